"""Packed rows of activations: boundaries write those of their round trip, products give the bits that it gives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.codegen.cuda.harness import Subject
from tests.codegen.sparse_harness import Operands, close, same
from v41c.ir import formats, packed
from v41c.ir.op import Example, Op, seeded
from v41c.ir.ops import op_types
from v41c.ir.ops.grouped_linear import GroupedLinear
from v41c.ir.ops.grouped_linear_quantized import GroupedLinearQuantized
from v41c.ir.ops.latent_norms import LatentNorms
from v41c.ir.ops.latents import Latents
from v41c.ir.ops.linear import Linear
from v41c.ir.ops.mhc_boundary import MhcBoundary
from v41c.ir.ops.mhc_enter import MhcEnter
from v41c.targets.cuda import SM_90, SM_100, CudaTarget

PRODUCTS = sorted(name for name, op in op_types().items() if op.packable)
#: one token, a tile of few, of many: enough that experts are sorted, and few blocks to interpret
VARIANTS = (1, 16, 48)


#: products that make floats of packed rows, and those whose tensor cores take rows and scales as they are
TARGETS = (SM_90, SM_100)


def call(op: Op, operands: Operands, bound: int, target: CudaTarget = SM_90) -> tuple[Tensor, ...]:
    return Subject.of(op, operands, target, bound).call(operands)


def packed_examples(name: str) -> Iterator[Example]:
    """Examples of an operation that take packed rows."""
    op = op_types()[name]
    places = [index for index, declared in enumerate(op.operands()) if declared.name in op.packable]
    for example in op.examples():
        if all((x := example.operands[index]) is not None and x.dtype == torch.uint8 for index in places):
            yield example


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
@pytest.mark.parametrize("bound", VARIANTS)
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_packed_rows_are_those_of_their_values(name: str, bound: int, target: CudaTarget) -> None:
    found = list(packed_examples(name))
    assert found
    for example in found:
        declared = [operand.name for operand in example.op.operands()]
        first = example.operands[0]
        assert first is not None
        tokens = min(bound, len(first))
        cut = tuple(
            operand[:tokens]
            if operand is not None and operand.shape[0] == len(first) and operand.dim() == 2
            else operand
            for operand in example.operands
        )
        plain = tuple(
            packed.values(operand) if operand is not None and name in example.op.packable else operand
            for name, operand in zip(declared, cut, strict=True)
        )
        for ours, theirs in zip(call(example.op, cut, bound, target), call(example.op, plain, bound), strict=True):
            if target == SM_90:
                assert same(ours, theirs)
            else:  # other tiles, and so another order
                close(ours, theirs)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
@pytest.mark.parametrize(
    ("kind", "bound", "columns"), [("fp8", 1, 4128), ("fp8", 16, 1120), ("fp8", 512, 2080), ("f32", 16, 1120)]
)
def test_sums_that_blocks_share(kind: str, bound: int, columns: int, target: CudaTarget) -> None:
    """Widths that leave the last step and the last block less than the others: no scale is read as a code."""
    generator = torch.Generator().manual_seed(1)

    def whole(*shape: int) -> Tensor:
        return torch.randint(-8, 9, shape, generator=generator).float()

    # sums of multiples of a power of two, below 2^24 of them: exact in any order
    x = (whole(min(bound, 3), columns) * torch.tensor([1.0, 2.0**-9, 2.0**11])[: min(bound, 3), None]).bfloat16()
    weight: tuple[Tensor, Tensor | None] = (whole(40, columns), None)
    if kind == "fp8":
        codes = torch.arange(2 * columns // 32).view(2, -1) % 5 + 119
        scales = codes.to(torch.uint8).view(torch.float8_e8m0fnu)
        weight = (whole(40, columns).to(torch.float8_e4m3fn), scales)
    rows = formats.pack(x, packed.FORMAT)
    (ours,) = call(Linear("f32"), (rows, *weight), bound, target)
    (theirs,) = call(Linear("f32"), (formats.round_trip(x, packed.FORMAT), *weight), bound)
    assert same(ours, theirs)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the NaNs that are planted here
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
@pytest.mark.parametrize("bound", [16, 512])
def test_rows_do_not_depend_on_their_neighbours(bound: int, target: CudaTarget) -> None:
    """Bytes of 255 are NaN, as codes and as scales."""
    normal = seeded(2)
    rows = formats.pack(normal(5, 96, dtype="bf16"), packed.FORMAT)
    scales = torch.full((2, 3), 125, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    weight = ((normal(40, 96) * 60).to(torch.float8_e4m3fn), scales)
    subject = Subject.of(Linear("f32"), (rows, *weight), target, bound)
    (whole,) = subject.call((rows, *weight))
    spoilt = rows.clone()
    spoilt[2] = 255
    (result,) = subject.call((spoilt, *weight))
    assert result[2].isnan().all()
    assert same(result[[0, 1, 3, 4]], whole[[0, 1, 3, 4]])


def boundary(tokens: int, width: int) -> Operands:
    normal = seeded(width)
    copies, outputs = 4, 24
    return (
        normal(tokens, copies, width, scale=2.0**20, dtype="bf16"),
        normal(tokens, width, scale=2.0**20, dtype="bf16"),
        normal(tokens, copies).sigmoid(),
        normal(tokens, copies, copies).softmax(-1),
        normal(tokens, copies).sigmoid(),
        normal(outputs, copies * width, scale=(copies * width) ** -0.5),
        normal(3).abs() + 0.5,
        normal(outputs),
        normal(width, dtype="bf16") * torch.exp2(normal(width) * 6).bfloat16(),
    )


@pytest.mark.parametrize(
    ("kind", "width", "bound"),
    [
        *((MhcBoundary, 288, bound) for bound in (1, 16, 512, 4096)),  # at 4096 in two steps of the tail
        *((MhcBoundary, 32, bound) for bound in (1, 16)),
        (MhcEnter, 288, 16),
    ],
)
def test_a_boundary_packs_its_round_trip(kind: type[MhcBoundary | MhcEnter], width: int, bound: int) -> None:
    """One launch; all other results are the same, and the rows are those that packing the norm itself gives."""
    operands = boundary(min(bound, 5), width)
    operands = operands if kind is MhcBoundary else (operands[0], *operands[4:])
    op = kind(1e-20, 1e-6, 20, packed.FORMAT)
    plain = call(op, operands, bound)
    subject = Subject.of(replace(op, packed=True), operands, SM_90, bound)
    found = subject.call(operands)
    assert len(subject.kernel.launches) == 1
    place = 2 if kind is MhcBoundary else 1
    assert same(found[place], formats.pack(found[place - 1], packed.FORMAT))
    assert same(packed.values(found[place]), plain[place])
    for index, (ours, theirs) in enumerate(zip(found, plain, strict=True)):
        assert index == place or same(ours, theirs)


@pytest.mark.parametrize("bound", [1, 16, 48])
def test_a_product_packs_its_round_trip(bound: int) -> None:
    """Three groups of 96 rows, which end within a tile, and sums that blocks share."""
    normal, tokens = seeded(3), min(bound, 5)
    x = (normal(tokens, 3, 1120) * torch.exp2(normal(tokens, 3, 1) * 6)).bfloat16()
    scales = (torch.arange(9 * 35).view(9, 35) % 5 + 118).to(torch.uint8).view(torch.float8_e8m0fnu)
    operands = (x, (normal(288, 1120) * 60).to(torch.float8_e4m3fn), scales)
    (unrounded,) = call(GroupedLinear(), operands, bound)
    (plain,) = call(GroupedLinearQuantized(packed.FORMAT), operands, bound)
    (rows,) = call(GroupedLinearQuantized(packed.FORMAT, packed=True), operands, bound)
    assert same(rows, formats.pack(unrounded, packed.FORMAT))
    assert same(packed.values(rows), plain)


@pytest.mark.parametrize("kind", [LatentNorms, Latents])
def test_latents_pack_the_round_trip_of_the_query(kind: type[LatentNorms | Latents]) -> None:
    """1280 values as in a release: no power of two."""
    normal = seeded(4)
    norms = (normal(1280, dtype="bf16"), normal(64, dtype="bf16"))
    angle = normal(1, 8) * 3
    tables = (angle.cos(), angle.sin())
    operands: Operands
    if kind is Latents:
        op: Op = Latents("bf16", 1e-6, packed.FORMAT, packed.FORMAT)
        x = formats.pack(normal(1, 96, dtype="bf16"), packed.FORMAT)
        scales = [torch.full((-(-rows // 32), 3), 120, dtype=torch.uint8) for rows in (1280, 64)]
        weights = [(normal(rows, 96) * 60).to(torch.float8_e4m3fn) for rows in (1280, 64)]
        operands = (x, *weights, *norms, *tables, *(scale.view(torch.float8_e8m0fnu) for scale in scales))
    else:
        op = LatentNorms(1e-6, packed.FORMAT, packed.FORMAT)
        values = (normal(1, 1280, dtype="bf16"), normal(1, 64, dtype="bf16"))
        operands = (values[0], norms[0], values[1], norms[1], *tables)
    unrounded, _ = call(replace(op, q_format="none"), operands, 1)  # type: ignore[call-arg]  # both kinds have it
    plain, keys = call(op, operands, 1)
    packing = op.packing()
    assert packing is not None
    rows, same_keys = call(packing[0], operands, 1)
    assert same(rows, formats.pack(unrounded, packed.FORMAT))
    assert same(packed.values(rows), plain)
    assert same(keys, same_keys)
