"""Selected rows of a compressed cache, dequantised."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tvm.script.ir_builder import tirx as T

from v41c.codegen.cpu.attention_entries import AHEAD, unpack_fp4
from v41c.codegen.cpu.frame import Body, build_kernel
from v41c.codegen.cpu.sparse import Types, prefetch, required
from v41c.codegen.cpu.tir import Expr, cast, const, copy_run, each, i64, let, local, loop, parallel, put, when
from v41c.codegen.kernel import CpuKernel
from v41c.ir.ops.gather_selected import GatherSelected
from v41c.ir.types import DType, TensorType

if TYPE_CHECKING:
    from v41c.targets.target import CpuTarget

_ROW_WORK = 4  # multiply-adds that dequantising an element is worth


def kernel(
    op: GatherSelected, operands: Types, results: tuple[TensorType, ...], target: CpuTarget, bounds: Mapping[str, int]
) -> CpuKernel:
    """The kernel; the rows of a token are shared out among the threads."""
    cache, selection = required(operands, 0, 1)
    chosen, width, row_items = int(selection.shape[1]), op.width, int(cache.shape[2])

    def emit(body: Body) -> None:
        (rows, picked, slots), (out,) = body.operands, body.results
        with loop(body.size(selection.shape[0])) as token:
            first, slot = let(token * chosen), let(cast(slots[token], "int64"))
            kept = local(T.int64(0))
            with loop(chosen) as i:
                number = let(picked[first + i])
                put(body.integers, kept.value, number)
                kept.set(kept.value + cast(number >= 0, "int64"))

            def start_of(place: Expr) -> Expr:
                number = cast(body.integers[T.max(T.min(place, kept.value - 1), i64(0))], "int64")
                return (slot * body.size(cache.shape[1]) + number) * row_items

            with parallel(chosen, chosen * width * _ROW_WORK) as place:
                target_at = let((first + place) * op.stride)
                if op.stride > width:
                    rest = let(target_at + width)
                    each(op.stride - width, lambda i, lanes: put(out, rest + i, const(0.0, lanes)))
                inside = let(cast(place < kept.value, "int32"))
                with when(inside == 0):
                    each(width, lambda i, lanes: put(out, target_at + i, const(0.0, lanes)))
                with when(inside == 1):
                    prefetch(rows, start_of(place + AHEAD), row_items)
                    start = let(start_of(place))
                    if cache.dtype == DType.U8:
                        unpack_fp4(rows, start, width, target, lambda i, values: put(out, target_at + i, values))
                    else:
                        copy_run(rows, start, out, target_at, width)

    return build_kernel(emit, op, operands, results, bounds, scratch_words=chosen)
