"""Products, norms, rotations and drafts: odd sizes, sums shared by blocks, hard values, rows by themselves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.codegen.cuda.harness import Subject
from tests.codegen.sparse_harness import Operands, reference, rows_of, same
from v41c.codegen.cuda import kernel_for
from v41c.ir.op import Op, seeded
from v41c.ir.ops.grouped_linear import GroupedLinear
from v41c.ir.ops.grouped_linear_quantized import GroupedLinearQuantized
from v41c.ir.ops.latent_norms import LatentNorms
from v41c.ir.ops.linear import Linear
from v41c.ir.ops.linear_group import LinearGroup
from v41c.ir.ops.markov_chain import MarkovChain
from v41c.ir.ops.rms_norm import RmsNorm
from v41c.ir.ops.rope import Rope
from v41c.ir.ops.rope_table import RopeTable
from v41c.ir.types import DType, TensorType
from v41c.targets.cuda import SM_90


def fp8(rows: int, columns: int, seed: int) -> tuple[Tensor, Tensor]:
    """A weight and its scales of 32 x 32, of magnitude about one."""
    normal = seeded(seed)
    codes = torch.arange(-(-rows // 32) * -(-columns // 32)).view(-(-rows // 32), -1) % 5 + 119
    return (normal(rows, columns) * 60).to(torch.float8_e4m3fn), codes.to(torch.uint8).view(torch.float8_e8m0fnu)


def run(op: Op, operands: Operands, bound: int) -> tuple[Tensor, ...]:
    return Subject.of(op, operands, SM_90, bound).call(operands)


def sums_close(ours: Tensor, theirs: Tensor, terms: int) -> None:
    """f32 sums of that many products of magnitude one, in another order; a bf16 result may be its neighbour."""
    relative = 2.0**-7 if ours.dtype == torch.bfloat16 else 0.0
    torch.testing.assert_close(ours, theirs, rtol=relative, atol=terms * 2.0**-24 * terms**0.5)


@pytest.mark.parametrize(("bound", "columns"), [(1, 4128), (16, 1120), (512, 2080)])
def test_sums_that_blocks_share(bound: int, columns: int) -> None:
    """Columns that leave the last block less than the others, and rows that leave the last tile less."""
    x = seeded(1)(min(bound, 3), columns, dtype="bf16")
    op = Linear("f32")
    operands = (x, *fp8(40, columns, 2))
    subject = Subject.of(op, operands, SM_90, bound)
    assert subject.kernel.launches[0].function.constants["SPLITS"] != 1
    (ours,) = subject.call(operands)
    sums_close(ours, reference(op, operands)[0], columns)
    (alone,) = subject.call(rows_of(op, operands, [len(x) - 1]))
    assert same(alone, ours[-1:])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the NaNs that are planted here
@pytest.mark.parametrize("kind", ["fp8", "bf16", "f32"])
@pytest.mark.parametrize("bound", [16, 512])
def test_rows_of_a_product_do_not_depend_on_their_neighbours(bound: int, kind: str) -> None:
    normal = seeded(3)
    x = normal(5, 96, dtype="f32" if kind == "f32" else "bf16")
    weight = fp8(70, 96, 4) if kind == "fp8" else (normal(70, 96, dtype=kind), None)
    op = Linear("f32")
    subject = Subject.of(op, (x, *weight), SM_90, bound)
    (whole,) = subject.call((x, *weight))
    sums_close(whole, reference(op, (x, *weight))[0], 96)
    spoilt = x.clone()
    spoilt[2] = float("nan")
    (result,) = subject.call((spoilt, *weight))
    assert result[2].isnan().all()
    assert same(result[[0, 1, 3, 4]], whole[[0, 1, 3, 4]])
    (part,) = subject.call((x[1:3], *weight))
    assert same(part, whole[1:3])


@pytest.mark.parametrize("bound", [1, 16])
def test_a_group_of_weights_of_two_types(bound: int) -> None:
    """fp8 weights share one launch, whose blocks find theirs; the bf16 weight has another."""
    normal = seeded(5)
    x = normal(min(bound, 3), 64, dtype="bf16")
    first, second, third = fp8(100, 64, 6), fp8(8, 64, 7), fp8(33, 64, 8)
    other = normal(9, 64, dtype="bf16")
    op = LinearGroup("f32")
    operands = (x, first[0], second[0], other, third[0], first[1], second[1], None, third[1])
    subject = Subject.of(op, operands, SM_90, bound)
    assert len(subject.kernel.launches) == 2
    for ours, theirs in zip(subject.call(operands), reference(op, operands), strict=True):
        sums_close(ours, theirs, 64)


@pytest.mark.parametrize("bound", [1, 16, 512])
def test_groups_of_rows_that_are_no_tile(bound: int) -> None:
    """A group of 96 rows is a tile and a half: its last tile must not reach into the next group's results."""
    x = seeded(9)(min(bound, 3), 3, 64, dtype="bf16")
    operands = (x, *fp8(3 * 96, 64, 10))
    (plain,) = run(GroupedLinear(), operands, bound)
    sums_close(plain, reference(GroupedLinear(), operands)[0], 64)
    op = GroupedLinearQuantized("fp8_e8m0_32")
    (rounded,) = run(op, operands, bound)
    torch.testing.assert_close(rounded, reference(op, operands)[0], rtol=2.0**-3, atol=0.0)


#: dense weights of a release: rows and columns of the projections of attention and of the shared expert
RELEASE = ((1280, 5120), (512, 5120), (32768, 1280), (5120, 8192), (4096, 1280), (2304, 5120), (5120, 2304))


@pytest.mark.parametrize("tokens", SM_90.variants)
@pytest.mark.parametrize(("rows", "columns"), RELEASE)
def test_products_of_a_release_fill_the_multiprocessors(rows: int, columns: int, tokens: int) -> None:
    """Nearly all of them; 80 blocks with 24 KB in flight hold most of a weight of 512 x 5120 at once."""
    x = TensorType(DType.BF16, ("T", columns))
    scale = TensorType(DType.E8M0, (-(-rows // 32), -(-columns // 32)))
    types = (x, TensorType(DType.F8E4M3, (rows, columns)), scale)
    kernel = kernel_for(Linear("bf16"), types, Linear("bf16").infer_results(types), SM_90, {"T": tokens})
    first, second, _ = kernel.launches[0].grid
    least = 80 if rows == 512 else 0.95 * SM_90.multiprocessors
    assert first.count * second.count * -(-tokens // second.tile) >= least


@pytest.mark.parametrize("inverse", [False, True])
def test_rotations_of_odd_rows(inverse: bool) -> None:
    """33 elements keep 23, so that pairs begin at an odd one; three heads are no power of two, nor are five pairs."""
    normal = seeded(11)
    angle = normal(4, 5) * 3
    operands = (normal(4, 3, 33), angle.cos(), angle.sin())
    (ours,) = run(Rope(inverse), operands, 16)
    torch.testing.assert_close(ours, reference(Rope(inverse), operands)[0], rtol=2.0**-22, atol=2.0**-22)


def test_latents_of_odd_rows() -> None:
    normal = seeded(12)
    angle = normal(3, 5) * 3
    op = LatentNorms(1e-6, "none", "none")
    operands = (normal(3, 40), normal(40), normal(3, 33), normal(33), angle.cos(), angle.sin())
    for ours, theirs in zip(run(op, operands, 16), reference(op, operands), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2.0**-20, atol=2.0**-20)


@pytest.mark.parametrize("scale", [2.0**-30, 2.0**50])
def test_norms_of_a_release_width(scale: float) -> None:
    operands = (seeded(13)(2, 5120, scale=scale), seeded(14)(5120))
    (ours,) = run(RmsNorm(1e-20), operands, 16)
    torch.testing.assert_close(ours, reference(RmsNorm(1e-20), operands)[0], rtol=2.0**-20, atol=0.0)


def test_angles_are_f32_products() -> None:
    """The cosine of the f32 angle; that of the exact angle is another at the end of the longest context."""
    op = RopeTable(64, 160000.0, 16.0, 65536, 32.0, 1.0, 0)
    positions = torch.tensor([0, 1, 4095, 99_999, 1_048_575], dtype=torch.int32)
    angle = positions.float().unsqueeze(-1) * op.frequencies()
    exact = positions.double().unsqueeze(-1) * op.frequencies().double()
    cos, sin = run(op, (positions,), 16)
    torch.testing.assert_close(cos.double(), angle.double().cos(), rtol=0, atol=2.0**-22)
    torch.testing.assert_close(sin.double(), angle.double().sin(), rtol=0, atol=2.0**-22)
    assert (angle.double().cos() - exact.cos()).abs().max() > 2.0**-10


@pytest.mark.parametrize("bound", [16, 512])
def test_drafts_of_several_blocks_and_of_ties(bound: int) -> None:
    """140 tokens of rank 200 are three blocks; integers make every sum exact, and equal logits common."""
    generator = torch.Generator().manual_seed(15)
    rows = 7
    logits = torch.randint(-2, 3, (rows, 140), generator=generator).float()
    embed, head = (torch.randint(-1, 2, (140, 200), generator=generator).bfloat16() for _ in range(2))
    embed[:70] = 0.0  # no bias: the first of the largest logits
    logits[3] = float("-inf")
    starts = torch.tensor([0, 0, 0, 0, 4, 5, 5], dtype=torch.int32)
    tokens = torch.tensor([139, 7, 7, 7, 3, 90, 7], dtype=torch.int32)
    operands = (logits, tokens, starts, embed, head)
    for ours, theirs in zip(run(MarkovChain(), operands, bound), reference(MarkovChain(), operands), strict=True):
        assert same(ours, theirs)


def test_drafts_of_a_long_run() -> None:
    """Past the rows that have launches of their own, one block goes on."""
    generator = torch.Generator().manual_seed(16)
    logits = torch.randint(-2, 3, (21, 12), generator=generator).float()
    embed, head = (torch.randint(-1, 2, (12, 3), generator=generator).float() for _ in range(2))
    starts = torch.tensor([0] * 19 + [19] * 2, dtype=torch.int32)
    operands = (logits, torch.full((21,), 5, dtype=torch.int32), starts, embed, head)
    for ours, theirs in zip(run(MarkovChain(), operands, 512), reference(MarkovChain(), operands), strict=True):
        assert same(ours, theirs)
