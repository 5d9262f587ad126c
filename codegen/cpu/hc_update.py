"""Update of the residual stream: every copy is read once and written once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from v41c.codegen.cpu.frame import Body, bound_of, build_kernel
from v41c.codegen.cpu.sparse import Types, required
from v41c.codegen.cpu.tir import Expr, each, let, load, parallel, product, splat, store
from v41c.codegen.kernel import CpuKernel
from v41c.ir.ops.hc_update import HcUpdate
from v41c.ir.types import TensorType

if TYPE_CHECKING:
    from v41c.targets.target import CpuTarget


def kernel(
    op: HcUpdate, operands: Types, results: tuple[TensorType, ...], target: CpuTarget, bounds: Mapping[str, int]
) -> CpuKernel:
    """The kernel."""
    (kind,) = required(operands, 0)
    copies, width = int(kind.shape[1]), int(kind.shape[2])

    def emit(body: Body) -> None:
        (stream, y, post, comb), (out,) = body.operands, body.results
        work = bound_of(kind.shape[0], bounds) * copies * copies * width
        with parallel(body.size(kind.shape[0]), work) as row:
            begin, start = let(row * (copies * width)), let(row * width)
            gains = [let(post[row * copies + copy]) for copy in range(copies)]
            mixes = [let(comb[row * (copies * copies) + index]) for index in range(copies * copies)]

            def update(i: Expr, lanes: int) -> None:
                added = let(load(y, start + i, lanes))
                sources = [let(load(stream, begin + copy * width + i, lanes)) for copy in range(copies)]
                for copy in range(copies):
                    total = product(splat(mixes[copy], lanes), sources[0])
                    for source in range(1, copies):
                        total = let(total + product(splat(mixes[source * copies + copy], lanes), sources[source]))
                    store(out, begin + copy * width + i, product(splat(gains[copy], lanes), added) + total)

            each(width, update)

    return build_kernel(emit, op, operands, results, bounds)
