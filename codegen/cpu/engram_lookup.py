"""Rows of an Engram table, dequantised. The table may be larger than memory: only the rows are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tvm.script.ir_builder import tirx as T

from v41c.codegen.cpu.frame import Body, bound_of, build_kernel
from v41c.codegen.cpu.numeric import decode_e4m3, decode_e8m0
from v41c.codegen.cpu.sparse import Types, prefetch, required
from v41c.codegen.cpu.tir import LANES, Buffer, Expr, at, cast, each, let, load, loop, parallel, store
from v41c.codegen.kernel import CpuKernel
from v41c.ir.ops.engram_lookup import EngramLookup
from v41c.ir.types import DType, TensorType

if TYPE_CHECKING:
    from v41c.targets.target import CpuTarget


def kernel(
    op: EngramLookup, operands: Types, results: tuple[TensorType, ...], target: CpuTarget, bounds: Mapping[str, int]
) -> CpuKernel:
    """The kernel."""
    rows, table = required(operands, 0, 1)
    count, width = int(rows.shape[1]), int(table.shape[1])

    def emit(body: Body) -> None:
        (numbers, values, scale), (out,) = body.operands, body.results
        with parallel(body.size(rows.shape[0]), bound_of(rows.shape[0], bounds) * count * width // 2) as token:
            with loop(count) as i:
                prefetch(values, numbers[token * count + i] * width, width)
            with loop(count) as i:
                number = let(numbers[token * count + i])
                read_row(table.dtype, values, scale, number, out, let((token * count + i) * width), width)

    return build_kernel(emit, op, operands, results, bounds)


def read_row(dtype: DType, values: Buffer, scale: Buffer, number: Expr, out: Buffer, place: Expr, width: int) -> None:
    """out[place …] = a row of the table; `number` and `place` are results of `let`."""
    start = let(number * width)
    if dtype != DType.F8E4M3:
        each(width, lambda j, lanes: store(out, place + j, load(values, start + j, lanes)))
        return
    with loop(width // 32) as group:
        factor = let(decode_e8m0(cast(scale[number * (width // 32) + group], "int32")))
        for part in range(0, 32, LANES):
            codes = cast(values[at(start + group * 32 + part, LANES)], "int32")
            value = decode_e4m3(codes) * T.broadcast(factor, LANES)
            store(out, place + group * 32 + part, value)
