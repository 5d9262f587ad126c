"""Rotary position embedding that pairs the halves of a head; the same bits as separate products and a sum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tvm.script.ir_builder import tirx as T

from v41c.codegen.cpu.frame import Body, bound_of, build_kernel
from v41c.codegen.cpu.sparse import Types, required
from v41c.codegen.cpu.tir import Expr, copy_run, each, let, load, parallel, product, store, when
from v41c.codegen.kernel import CpuKernel
from v41c.ir.ops.rope_halves import RopeHalves
from v41c.ir.types import TensorType

if TYPE_CHECKING:
    from v41c.targets.target import CpuTarget


def kernel(
    op: RopeHalves, operands: Types, results: tuple[TensorType, ...], target: CpuTarget, bounds: Mapping[str, int]
) -> CpuKernel:
    """The kernel."""
    (x,) = required(operands, 0)
    heads, width = int(x.shape[1]), int(x.shape[2])
    half = width // 2

    def emit(body: Body) -> None:
        (source, cosines, sines), (out,) = body.operands, body.results
        work = bound_of(x.shape[0], bounds) * heads * width // 4
        with parallel(body.size(x.shape[0]) * heads, work) as row:
            start, angle = let(row * width), let(row // heads * half)

            def rotate(i: Expr, lanes: int) -> None:
                a, b = let(load(source, start + i, lanes)), let(load(source, start + i + half, lanes))
                c, s = let(load(cosines, angle + i, lanes)), let(load(sines, angle + i, lanes))
                store(out, start + i, product(a, c) - product(b, s))
                store(out, start + i + half, product(b, c) + product(a, s))

            with when(row % heads < op.heads):
                each(half, rotate)
            with when(T.GE(row % heads, T.int64(op.heads))):
                copy_run(source, start, out, start, width)

    return build_kernel(emit, op, operands, results, bounds)
