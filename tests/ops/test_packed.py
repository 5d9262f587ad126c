"""Packed rows of activations: their values are those of the round trip, and what is no such row is refused."""

from __future__ import annotations

import pytest
import torch

from v41c.errors import VerifyError
from v41c.ir import formats, packed
from v41c.ir.op import Op, seeded
from v41c.ir.ops.linear import Linear
from v41c.ir.ops.linear_group import LinearGroup
from v41c.ir.ops.mhc_boundary import MhcBoundary
from v41c.ir.ops.mhc_enter import MhcEnter
from v41c.ir.ops.moe_experts import MoeExperts
from v41c.ir.ops.moe_layer import MoeLayer
from v41c.ir.ops.pack_rows import PackRows
from v41c.ir.torch_types import type_of
from v41c.ir.types import DType, TensorType, f32


def test_values_are_the_round_trip_in_bf16() -> None:
    """From the smallest scale to the largest, with zeros of both signs, infinities and NaN in a group."""
    x = seeded(3)(300, 96) * torch.exp2(torch.arange(-170.0, 130.0)[:, None])
    x[::7, 5], x[::5, 40], x[::11, 70], x[::13, 3] = -0.0, 0.0, torch.inf, torch.nan
    x = x.bfloat16()
    rows = PackRows(packed.FORMAT).reference(x)
    wanted = formats.round_trip(x, packed.FORMAT)
    assert (rows.shape, rows.dtype) == ((300, 99), torch.uint8)
    found = packed.values(rows)
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.nan_to_num(0.0).view(torch.uint8), wanted.nan_to_num(0.0).view(torch.uint8))
    assert packed.values(x) is x


@pytest.mark.parametrize("op", [Linear("bf16"), LinearGroup("bf16")], ids=str)
def test_rows_of_part_of_a_group_are_refused(op: Op) -> None:
    x, weight = TensorType(DType.U8, ("T", 98)), TensorType(DType.BF16, (8, 95))
    weights = (weight,) if isinstance(op, Linear) else (weight, weight)
    missing = (None,) * (len(op.operands()) - 1 - len(weights))
    with pytest.raises(VerifyError, match="linear: packed x: expected rows of a multiple of 33 bytes, got 98"):
        op.infer_results((x, *weights, *missing))


def test_rows_of_another_width_than_the_weight_are_refused() -> None:
    with pytest.raises(VerifyError, match=r"linear: weight shape: expected \[8, 64\], got \[8, 66\]"):
        Linear("f32").infer_results((TensorType(DType.U8, ("T", 66)), TensorType(DType.BF16, (8, 66)), None))


def test_rows_of_three_axes_are_refused() -> None:
    example = next(iter(MoeExperts.examples()))
    types = [None if operand is None else type_of(operand) for operand in example.operands]
    with pytest.raises(VerifyError, match="moe_experts: x rank: expected 2, got 3"):
        example.op.infer_results((TensorType(DType.U8, ("T", 2, 66)), *types[1:]))


def test_a_layer_whose_inputs_are_packed_in_part_is_refused() -> None:
    example = next(iter(MoeLayer.examples()))
    types = [None if operand is None else type_of(operand) for operand in example.operands]
    types[0] = TensorType(DType.U8, (1, 66))
    with pytest.raises(VerifyError, match="moe_layer: shared_x dtype: expected u8, got bf16"):
        example.op.infer_results(tuple(types))


@pytest.mark.parametrize("format", ["none", "fp4_e8m0_32"])
@pytest.mark.parametrize("kind", [MhcEnter, MhcBoundary])
def test_a_boundary_packs_in_the_format_of_products(kind: type[MhcEnter | MhcBoundary], format: str) -> None:
    example = next(iter(kind.examples()))
    types = tuple(None if operand is None else type_of(operand) for operand in example.operands)
    message = rf"{kind.name()}: .*packed format: expected fp8_e8m0_32, got {format}"
    with pytest.raises(VerifyError, match=message):
        kind(1e-20, 1e-6, 20, format, packed=True).infer_results(types)


@pytest.mark.parametrize(
    ("op", "x", "message"),
    [
        (PackRows("fp8"), f32("T", 64), r"pack_rows: format: expected \['fp4_e4m3_16', .*\], got fp8"),
        (PackRows("fp8_e8m0_32"), f32("T", 80), "pack_rows: last axis: expected a multiple of 32, got 80"),
        (PackRows("fp8_e8m0_32"), TensorType(DType.U8, ("T", 64)), "pack_rows: x dtype: expected f32 or bf16, got u8"),
    ],
)
def test_what_cannot_be_packed_is_refused(op: PackRows, x: TensorType, message: str) -> None:
    with pytest.raises(VerifyError, match=message):
        op.infer_results((x,))
