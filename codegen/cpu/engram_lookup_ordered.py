"""Rows of an Engram table in their order, equal ones once. The table may be larger than memory: only rows are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tvm.script.ir_builder import tirx as T

from v41c.codegen.cpu.engram_lookup import read_row
from v41c.codegen.cpu.frame import Body, bound_of, build_kernel
from v41c.codegen.cpu.sparse import Types, prefetch, required
from v41c.codegen.cpu.tir import cast, copy_run, i64, let, loop, parallel, when
from v41c.codegen.kernel import CpuKernel
from v41c.ir.ops.engram_lookup_ordered import EngramLookupOrdered
from v41c.ir.types import TensorType

if TYPE_CHECKING:
    from v41c.targets.target import CpuTarget

AHEAD = 8  # rows between the prefetch of a row and its use


def kernel(
    op: EngramLookupOrdered,
    operands: Types,
    results: tuple[TensorType, ...],
    target: CpuTarget,
    bounds: Mapping[str, int],
) -> CpuKernel:
    """The kernel; a thread takes neighbouring rows, and reads again what its neighbour ended with."""
    rows, table = required(operands, 0, 2)
    each, width = int(rows.shape[1]), int(table.shape[1])

    def emit(body: Body) -> None:
        (numbers, places, values, scale), (out,) = body.operands, body.results
        count = let(body.size(rows.shape[0]) * each)
        with parallel(body.size(rows.shape[0]), bound_of(rows.shape[0], bounds) * each * width // 2) as piece:
            first = let(piece * each)
            with loop(each) as i:
                number, place = let(numbers[first + i]), let(cast(places[first + i], "int64") * width)
                before = T.max(i - 1, i64(0))
                same = let(cast(T.And(i > 0, numbers[first + before] == number), "int32"))
                with when(same == 1):
                    copy_run(out, cast(places[first + before], "int64") * width, out, place, width)
                with when(same == 0):
                    prefetch(values, numbers[T.min(first + i + AHEAD, count - 1)] * width, width)
                    read_row(table.dtype, values, scale, number, out, place, width)

    return build_kernel(emit, op, operands, results, bounds)
