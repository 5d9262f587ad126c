"""Selected rows of a compressed cache, dequantised."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tvm.script.ir_builder import tirx as T

from v41c.codegen.cpu.attention_entries import AHEAD, unpack_fp4
from v41c.codegen.cpu.frame import Body, bound_of, build_kernel
from v41c.codegen.cpu.sparse import Types, prefetch, required
from v41c.codegen.cpu.tir import Expr, cast, const, copy_run, each, i64, let, parallel, store, when
from v41c.codegen.kernel import CpuKernel
from v41c.ir.ops.gather_selected import GatherSelected
from v41c.ir.types import DType, TensorType

if TYPE_CHECKING:
    from v41c.targets.target import Target

_ROW_WORK = 4  # multiply-adds that dequantising an element is worth


def kernel(
    op: GatherSelected, operands: Types, results: tuple[TensorType, ...], target: Target, bounds: Mapping[str, int]
) -> CpuKernel:
    """The kernel; the rows of all tokens are shared out among the threads."""
    cache, selection = required(operands, 0, 1)
    chosen, width, row_items = int(selection.shape[1]), op.width, int(cache.shape[2])

    def emit(body: Body) -> None:
        (rows, picked, slots), (out,) = body.operands, body.results
        count = let(body.size(selection.shape[0]) * chosen)
        work = bound_of(selection.shape[0], bounds) * chosen * width * _ROW_WORK

        def start_of(entry: Expr) -> Expr:
            row = T.max(cast(picked[entry], "int64"), i64(0))
            return (cast(slots[entry // chosen], "int64") * body.size(cache.shape[1]) + row) * row_items

        with parallel(count, work) as entry:
            place, number = let(entry * width), let(picked[entry])
            with when(number < 0):
                each(width, lambda i, lanes: store(out, place + i, const(0.0, lanes)))
            with when(number >= 0):
                prefetch(rows, start_of(T.min(entry + AHEAD, count - 1)), row_items)
                start = let(start_of(entry))
                if cache.dtype == DType.U8:
                    unpack_fp4(rows, start, width, target, lambda i, values: store(out, place + i, values))
                else:
                    copy_run(rows, start, out, place, width)

    return build_kernel(emit, op, operands, results, bounds)
