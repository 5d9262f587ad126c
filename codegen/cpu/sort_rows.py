"""The order of table rows: a merge sort of pair numbers, and the request to the operating system (`runtime.c`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tvm.script.ir_builder import tirx as T

from v41c.codegen.cpu.frame import Body, bound_of, build_kernel
from v41c.codegen.cpu.sparse import Types, required
from v41c.codegen.cpu.tir import Buffer, Expr, cast, i64, let, local, loop, put, select
from v41c.codegen.kernel import CpuKernel
from v41c.ir.ops.sort_rows import SortRows
from v41c.ir.types import TensorType

if TYPE_CHECKING:
    from v41c.targets.target import CpuTarget


def kernel(
    op: SortRows, operands: Types, results: tuple[TensorType, ...], target: CpuTarget, bounds: Mapping[str, int]
) -> CpuKernel:
    """The kernel."""
    (kind,) = required(operands, 0)
    most = bound_of(kind.shape[0], bounds) * int(kind.shape[1])

    def emit(body: Body) -> None:
        rows, tables, (ordered, places) = body.operands[0], body.operands[1:], body.results
        count = let(body.size(kind.shape[0]) * int(kind.shape[1]))
        with loop(count) as i:
            put(places, i, cast(i, "int32"))
        width = local(T.int64(1))
        with T.While(width.value < count):
            # in pairs of passes, so that the result ends where it belongs
            _merge(rows, places, body.integers, width.value, count)
            _merge(rows, body.integers, places, let(width.value * 2), count)
            width.set(width.value * 4)
        with loop(count) as i:
            put(ordered, i, rows[places[i]])
        for table, table_kind in zip(tables, operands[1:], strict=True):
            if table_kind is not None:
                size = TensorType(table_kind.dtype, table_kind.shape[1:]).size_bytes
                T.evaluate(T.call_extern("int32", "v41c_read_ahead", table.data, i64(size), ordered.data, count))

    return build_kernel(emit, op, operands, results, bounds, scratch_words=most)


def _merge(rows: Buffer, source: Buffer, out: Buffer, width: Expr, count: Expr) -> None:
    """Merge neighbouring runs of `width` pairs that ascend by row, the left run's first among equals."""
    with loop((count + width * 2 - 1) // (width * 2)) as run:
        start = let(run * width * 2)
        middle, end = let(T.min(start + width, count)), let(T.min(start + width * 2, count))
        left, right = local(start), local(middle)
        with loop(end - start) as i:
            a, b = let(source[T.min(left.value, middle - 1)]), let(source[T.min(right.value, count - 1)])
            from_left = let(
                select(T.And(left.value < middle, T.Or(right.value >= end, rows[a] <= rows[b])), T.int32(1), T.int32(0))
            )
            put(out, start + i, select(from_left == 1, a, b))
            left.set(left.value + i64(from_left))
            right.set(right.value + i64(1 - from_left))
