"""Mixtures of experts: grouping by expert, orders, NaN that must stay where it is, large scales, refusals.

Inputs are integers and scales powers of two, so that first products are exact in any order: hidden activations then
round as the reference's do, and outputs differ by what the order of f32 sums of up to 160 terms makes of a bf16.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from tests.codegen.cuda.harness import Subject
from tests.codegen.cuda.interpreter import run_blocks_backwards
from tests.codegen.sparse_harness import Operands, reference, rows_of, same
from v41c.errors import UnsupportedError
from v41c.ir import formats, packed
from v41c.ir.op import Op
from v41c.ir.ops.moe_experts import MoeExperts
from v41c.ir.ops.moe_layer import MoeLayer
from v41c.targets.cuda import SM_90, SM_100, CudaTarget

EXPERTS, CHOICES = 7, 3
WIDTH, INNER = 96, 160  # no powers of two, and no multiples of a step of 128 or of a tile of 64
#: tokens of a variant that sorts: enough for that, and few blocks to interpret
MANY = 48
NAN = 0xFF


@dataclass(frozen=True)
class Case:
    """Operands of `moe_layer`; of `moe_experts` without the shared ones."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    stacks: tuple[Tensor, ...]
    scales: tuple[Tensor, ...]
    shared: tuple[Tensor, ...]
    shared_scales: tuple[Tensor, ...]

    @property
    def experts(self) -> tuple[Op, Operands]:
        """The routed ones alone."""
        return MoeExperts(8.0, "fp8_e8m0_32"), (self.x, self.ids, self.weights, *self.stacks, *self.scales)

    @property
    def layer(self) -> tuple[Op, Operands]:
        """With the shared one, which sees the same input."""
        routed = (self.x, self.ids, self.weights, *self.stacks)
        op = MoeLayer(8.0, "fp8_e8m0_32", "fp8_e8m0_32", "bf16")
        return op, (*routed, self.x, *self.shared, *self.scales, *self.shared_scales)


def case(tokens: int, exponent: int = 0, seed: int = 1) -> Case:
    """Experts with scales of about 2^exponent for `tokens` tokens; expert 6 is nobody's choice, and NaN."""
    generator = torch.Generator().manual_seed(seed)

    def whole(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high + 1, shape, generator=generator)

    shapes = ((INNER, WIDTH), (INNER, WIDTH), (WIDTH, INNER))
    stacks = tuple(
        whole(0, 255, EXPERTS, rows, columns // 2).to(torch.uint8).view(torch.int8) for rows, columns in shapes
    )
    codes = [whole(120, 123, EXPERTS, rows, columns // 32) + exponent for rows, columns in shapes]
    for stack in codes:
        stack[6] = NAN
    ids = torch.rand(tokens, EXPERTS - 1, generator=generator).argsort(1)[:, :CHOICES].sort(1).values.int()
    shared = tuple(whole(-8, 8, *shape).float().to(torch.float8_e4m3fn) for shape in shapes)
    return Case(
        whole(-8, 8, tokens, WIDTH).bfloat16(),
        ids,
        torch.rand(tokens, CHOICES, generator=generator) + 0.1,
        stacks,
        tuple(stack.to(torch.uint8).view(torch.float8_e8m0fnu) for stack in codes),
        shared,
        tuple(
            torch.full((rows // 32, columns // 32), 123 + exponent).to(torch.uint8).view(torch.float8_e8m0fnu)
            for rows, columns in shapes
        ),
    )


def close(ours: Tensor, theirs: Tensor) -> None:
    """Experts' outputs may round to a neighbour, of which three and a shared one are added up."""
    largest = float(theirs.abs().max())
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=0.0, atol=largest * 2.0**-7)


def packed_inputs(op: Op, operands: Operands) -> Operands:
    """Operands with packed rows for the inputs of products: the same numbers."""
    return tuple(
        formats.pack(operand, packed.FORMAT) if operand is not None and declared.name in op.packable else operand
        for declared, operand in zip(op.operands(), operands, strict=True)
    )


@pytest.mark.parametrize(("variant", "tokens"), [(1, 1), (16, 0), (16, 1), (16, 3), (16, 16), (MANY, 17)])
def test_a_layer(variant: int, tokens: int) -> None:
    op, operands = case(tokens).layer
    (ours,) = Subject.of(op, operands, SM_90, variant).call(operands)
    assert ours.shape == (tokens, WIDTH)
    if tokens:
        close(ours, reference(op, operands)[0])
        assert same(call_packed(op, operands, SM_90, variant), ours)


def call_packed(op: Op, operands: Operands, target: CudaTarget, variant: int) -> Tensor:
    given = packed_inputs(op, operands)
    (ours,) = Subject.of(op, given, target, variant).call(given)
    return ours


@pytest.mark.parametrize("format", ["fp8_e8m0_32", "none"])
@pytest.mark.parametrize(("variant", "tokens"), [(16, 3), (MANY, 17)])
def test_tensor_cores_that_apply_scales(variant: int, tokens: int, format: str) -> None:
    """To packed rows of inputs, and of hidden activations where these are rounded to the same format."""
    _, operands = case(tokens).layer
    op = MoeLayer(8.0, format, format, "bf16")
    close(call_packed(op, operands, SM_100, variant), reference(op, operands)[0])


def test_one_expert_for_all_takes_several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """40 tokens of expert 2 are two tiles of 32, which leave alone what comes before and after, done already or not."""
    given = case(40)
    ids = given.ids.clone()
    ids[:] = torch.tensor([0, 2, 5], dtype=torch.int32)
    ids[7] = torch.tensor([1, 2, 3], dtype=torch.int32)
    op, operands = replace(given, ids=ids).experts
    subject = Subject.of(op, operands, SM_90, MANY)
    (ours,) = subject.call(operands)
    close(ours, reference(op, operands)[0])
    run_blocks_backwards(monkeypatch)
    assert same(subject.call(operands)[0], ours)


@pytest.mark.parametrize("target", [SM_90, SM_100], ids=lambda target: target.name)
@pytest.mark.parametrize("variant", [16, MANY])
def test_a_token_does_not_see_its_neighbours(variant: int, target: CudaTarget) -> None:
    op, operands = case(9).layer
    if target.has_block_scaled_mma:
        operands = packed_inputs(op, operands)
    subject = Subject.of(op, operands, target, variant)
    (whole,) = subject.call(operands)
    rows = [8, 0, 3]
    assert same(subject.call(rows_of(op, operands, rows))[0], whole[rows])


@pytest.mark.parametrize("variant", [1, 16, MANY])
def test_experts_may_come_in_any_order(variant: int) -> None:
    """Sums are in the order of the experts, whatever the order of the choices: outputs so far apart that it matters."""
    given = replace(case(1), weights=torch.tensor([[1.0, 2.0**-17, 2.0**-18]]))
    op, operands = MoeExperts(8.0, "none"), given.experts[1]
    turned = replace(given, ids=given.ids.flip(1), weights=given.weights.flip(1)).experts[1]
    subject = Subject.of(op, operands, SM_90, variant)
    assert same(subject.call(turned)[0], subject.call(operands)[0])


@pytest.mark.parametrize("variant", [16, MANY])
def test_nan_stays_with_its_token(variant: int) -> None:
    """Without a round trip, whose maximum of nothing but NaN the interpreter warns of."""
    given = case(5)
    op = MoeLayer(8.0, "none", "none", "bf16")
    (clean,) = (subject := Subject.of(op, given.layer[1], SM_90, variant)).call(given.layer[1])
    given.x[3, 5] = float("nan")
    (ours,) = subject.call(given.layer[1])
    others = [0, 1, 2, 4]
    assert same(ours[others], clean[others])
    assert ours[3].isnan().all()


@pytest.mark.parametrize("exponent", [-40, 60])
@pytest.mark.parametrize("variant", [1, 16])
def test_scales_far_from_one(variant: int, exponent: int) -> None:
    """fp4 numbers go through exponents of their own on the way: 2^-126 and 2^64, or 2^-6."""
    given = replace(case(1), scales=case(1, exponent).scales)
    op, operands = given.experts
    (ours,) = Subject.of(op, operands, SM_90, variant).call(operands)
    close(ours, reference(op, operands)[0])
    close(call_packed(op, operands, SM_100, variant), ours)


def test_widths_that_are_no_whole_groups_are_refused() -> None:
    x = torch.zeros(1, 48, dtype=torch.bfloat16)
    stacks = (torch.zeros(2, 40, 48).bfloat16(), torch.zeros(2, 40, 48).bfloat16(), torch.zeros(2, 48, 40).bfloat16())
    operands = (x, torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 1), *stacks, None, None, None)
    with pytest.raises(UnsupportedError, match="w1: expected whole groups of its formats, got 40 rows of 48"):
        Subject.of(MoeExperts(1.0, "fp8_e8m0_32"), operands, SM_90, 1)


def test_an_activation_of_fp4() -> None:
    """Groups of 16 with e4m3 scales."""
    op, operands = case(2).experts
    op = MoeExperts(8.0, "fp4_e4m3_16")
    (ours,) = Subject.of(op, operands, SM_90, 16).call(operands)
    close(ours, reference(op, operands)[0])
    assert not torch.equal(ours, Subject.of(MoeExperts(8.0, "none"), operands, SM_90, 16).call(operands)[0])


def test_every_code_of_fp4_is_read_in_its_place() -> None:
    """One input of 1 at a time finds each value of a row: all codes in all places of a word, on both units."""
    width, inner = 64, 32
    codes = (torch.arange(inner * width) * 5 + torch.arange(inner * width) // 16).view(1, inner, width) % 16
    w3 = formats.pack_nibbles(codes.to(torch.uint8)).view(torch.int8)
    one = torch.full((1, inner, width), 2).to(torch.uint8)  # the code of 1
    w1 = formats.pack_nibbles(one).view(torch.int8)
    w2 = formats.pack_nibbles((torch.eye(width, inner) * 2).to(torch.uint8)[None]).view(torch.int8)
    scales = [
        torch.full((1, rows, columns // 32), 127).to(torch.uint8).view(torch.float8_e8m0fnu)
        for rows, columns in ((inner, width), (inner, width), (width, inner))
    ]
    for variant, at in ((1, 37), (16, 37), (1, 2), (16, 2)):
        x = torch.zeros(1, width).bfloat16()
        x[0, at] = 8.0
        operands = (x, torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 1), w1, w3, w2, *scales)
        op = MoeExperts(1e4, "none")
        (ours,) = Subject.of(op, operands, SM_90, variant).call(operands)
        assert same(ours, reference(op, operands)[0])
        assert same(call_packed(op, operands, SM_100, variant), ours)
        # silu(8) is 8 in bf16, up is 8 times the code's value, down copies the first 32
        values = formats.decode_e2m1(codes[0, :, at])
        assert torch.equal(ours[0, :inner], 64.0 * values)
