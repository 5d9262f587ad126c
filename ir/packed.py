"""Activations as products take them: floats, or rows packed with their scales, as ring caches have them.

A packed row u8 [K + K/32] is K e4m3 codes, then their e8m0 scales: 33/64 of the bytes of its values in bf16, which they
are exact in.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from v41c.ir import formats
from v41c.ir.types import DType, TensorType

if TYPE_CHECKING:
    from torch import Tensor

    from v41c.ir.op import Op

FORMAT = "fp8_e8m0_32"
#: bytes of a group and its scale
_GROUP_BYTES = formats.FORMATS[FORMAT].row_bytes(32)


def replaced(op: Op, format: str, result: int) -> tuple[Op, int] | None:
    """`Op.packing` of an operation that has `packed`, and rounds a result to `format`."""
    if format != FORMAT or op.attributes()["packed"]:
        return None
    return replace(op, packed=True), result  # type: ignore[call-arg]  # of the classes that call


def values_type(op: Op, name: str, x: TensorType) -> TensorType:
    """The type of the values of `x` [T, …], an operand of `op`: itself, or of packed rows bf16 [T, K]."""
    if x.dtype != DType.U8:
        return x
    op.require_rank(name, x, 2)
    size = int(x.shape[1])
    op.require(size % _GROUP_BYTES == 0, f"packed {name}", f"rows of a multiple of {_GROUP_BYTES} bytes", size)
    return TensorType(DType.BF16, (x.shape[0], width(size)))


def values(x: Tensor) -> Tensor:
    """The values of `x` [T, …]: itself, or of packed rows bf16 [T, K]."""
    import torch

    return formats.unpack(x, FORMAT, width(x.shape[1])).bfloat16() if x.dtype == torch.uint8 else x


def width(row_bytes: int) -> int:
    """Values of a packed row of so many bytes."""
    return row_bytes // _GROUP_BYTES * 32
