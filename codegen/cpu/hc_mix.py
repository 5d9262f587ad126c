"""Collapse of the residual copies, in ascending order of the copies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from v41c.codegen.cpu.frame import Body, bound_of, build_kernel
from v41c.codegen.cpu.sparse import Types, required
from v41c.codegen.cpu.tir import Expr, each, let, load, parallel, product, splat, store
from v41c.codegen.kernel import CpuKernel
from v41c.ir.ops.hc_mix import HcMix
from v41c.ir.types import TensorType

if TYPE_CHECKING:
    from v41c.targets.target import CpuTarget


def kernel(
    op: HcMix, operands: Types, results: tuple[TensorType, ...], target: CpuTarget, bounds: Mapping[str, int]
) -> CpuKernel:
    """The kernel."""
    (kind,) = required(operands, 0)
    copies, width = int(kind.shape[1]), int(kind.shape[2])

    def emit(body: Body) -> None:
        (stream, pre), (out,) = body.operands, body.results
        with parallel(body.size(kind.shape[0]), bound_of(kind.shape[0], bounds) * copies * width) as row:
            begin, end = let(row * (copies * width)), let(row * width)
            weights = [let(pre[row * copies + copy]) for copy in range(copies)]

            def mix(i: Expr, lanes: int) -> None:
                total = product(splat(weights[0], lanes), load(stream, begin + i, lanes))
                for copy in range(1, copies):
                    term = product(splat(weights[copy], lanes), load(stream, begin + copy * width + i, lanes))
                    total = let(total + term)
                store(out, end + i, total)

            each(width, mix)

    return build_kernel(emit, op, operands, results, bounds)
