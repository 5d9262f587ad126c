"""What the kernels that choose, move and attend to cached rows share beyond the common vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

from tvm.script.ir_builder import tirx as T

from v41c.codegen.cpu.tir import (
    LANES,
    Buffer,
    Expr,
    Local,
    const,
    i64,
    itemsize,
    let,
    local,
    put,
    shuffle,
)
from v41c.ir.types import TensorType

Types = Sequence[TensorType | None]


def required(types: Types, *indices: int) -> tuple[TensorType, ...]:
    """Types of operands that are always there."""
    kinds = [types[index] for index in indices]
    if None in kinds:
        raise ValueError(f"operands: expected all of {indices}, got {kinds}")
    return tuple(kind for kind in kinds if kind is not None)


def array(count: int, dtype: str = "float32") -> Buffer:
    """Memory on the stack whatever its size, promoted to registers where all indices are constants."""
    return T.alloc_buffer((count,), dtype, annotations={"disable_lower_builtin": True})


def registers(count: int, value: float = 0.0) -> list[Local]:
    """`count` vector variables."""
    return [local(const(value, LANES)) for _ in range(count)]


def round_up(value: int, multiple: int = LANES) -> int:
    """The least multiple that is not smaller."""
    return -(-value // multiple) * multiple


def broadcast(buffer: Buffer, index: Expr) -> Expr:
    """One element in every lane."""
    return T.broadcast(buffer[index], LANES)


def fill(buffer: Buffer, start: Expr, count: Expr, value: Expr) -> None:
    """buffer[start … start + count) = value, element by element."""
    with T.serial(T.int64(0), i64(count)) as i:
        put(buffer, start + i, value)


def prefetch(buffer: Buffer, start: Expr, items: int) -> None:
    """Ask for memory that is read soon."""
    start, size = let(start), itemsize(str(buffer.dtype))
    for offset in range(0, items, 64 // size):
        address = T.address_of(buffer[start + offset])
        T.evaluate(T.call_llvm_intrin("void", "llvm.prefetch.p0", address, T.int32(0), T.int32(3), T.int32(1)))


def transpose_words(rows: Sequence[Expr]) -> list[Expr]:
    """Four int32x16 of sixteen int32x4: lane l of vector k is word k of row l."""
    quads = [let(shuffle([rows[j + 4 * i] for i in range(4)], range(16))) for j in range(4)]

    def zip_words(a: Expr, b: Expr, picked: tuple[int, int]) -> Expr:
        return let(shuffle([a, b], [side + 4 * i + k for i in range(4) for k in picked for side in (0, 16)]))

    def zip_pairs(a: Expr, b: Expr, first: int) -> Expr:
        return let(shuffle([a, b], [side + 4 * i + first + k for i in range(4) for side in (0, 16) for k in (0, 1)]))

    made = []
    for picked in ((0, 1), (2, 3)):
        even, odd = zip_words(quads[0], quads[1], picked), zip_words(quads[2], quads[3], picked)
        made += [zip_pairs(even, odd, 0), zip_pairs(even, odd, 2)]
    return made
