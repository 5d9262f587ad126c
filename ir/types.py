"""Element types and tensor types with named symbolic dimensions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

Dim = int | str


class DType(StrEnum):
    """Element types. `f4e2m1` is packed two per byte, the even index in the low nibble."""

    F32 = "f32"
    BF16 = "bf16"
    F8E4M3 = "f8e4m3"
    F4E2M1 = "f4e2m1"
    E8M0 = "e8m0"
    I32 = "i32"
    I64 = "i64"
    BOOL = "bool"
    U8 = "u8"

    @property
    def bits(self) -> int:
        """Storage bits of one element."""
        return _BITS[self]


_BITS = {
    DType.F32: 32,
    DType.BF16: 16,
    DType.F8E4M3: 8,
    DType.F4E2M1: 4,
    DType.E8M0: 8,
    DType.I32: 32,
    DType.I64: 64,
    DType.BOOL: 8,
    DType.U8: 8,
}


@dataclass(frozen=True)
class TensorType:
    """An element type and a shape; a dimension is a number or a name (`T`, `C2`, …), never unknown.

    Packed `f4e2m1` shapes count elements, not bytes.
    """

    dtype: DType
    shape: tuple[Dim, ...]

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(str(dim) for dim in self.shape)}]"

    @property
    def symbols(self) -> tuple[str, ...]:
        """Names of the symbolic dimensions, in order of appearance."""
        return tuple(dict.fromkeys(dim for dim in self.shape if isinstance(dim, str)))

    def bind(self, dims: Mapping[str, int]) -> TensorType:
        """The same type with every symbolic dimension replaced by its value; KeyError names a missing one."""
        return TensorType(self.dtype, tuple(dims[dim] if isinstance(dim, str) else dim for dim in self.shape))

    @property
    def elements(self) -> int:
        """Number of elements of a type without symbolic dimensions."""
        return math.prod(int(dim) for dim in self.shape)

    @property
    def size_bytes(self) -> int:
        """Storage bytes of a type without symbolic dimensions."""
        return (self.elements * self.dtype.bits + 7) // 8


def f32(*shape: Dim) -> TensorType:
    """`f32` tensor type."""
    return TensorType(DType.F32, shape)


def i32(*shape: Dim) -> TensorType:
    """`i32` tensor type."""
    return TensorType(DType.I32, shape)
