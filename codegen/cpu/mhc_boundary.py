"""A sublayer boundary: y and the stream are read once, the new stream and u written once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from v41c.codegen.cpu import packed, tir
from v41c.codegen.cpu.frame import Body, bound_of, build_kernel
from v41c.codegen.cpu.hc_coefficients import Coefficients
from v41c.codegen.cpu.mhc import Entry
from v41c.codegen.cpu.product import weight_layouts
from v41c.codegen.cpu.sparse import Types, required
from v41c.codegen.cpu.tir import Expr
from v41c.codegen.kernel import CpuKernel
from v41c.ir.ops.mhc_boundary import MhcBoundary
from v41c.ir.types import TensorType

if TYPE_CHECKING:
    from v41c.targets.target import CpuTarget


def kernel(
    op: MhcBoundary, operands: Types, results: tuple[TensorType, ...], target: CpuTarget, bounds: Mapping[str, int]
) -> CpuKernel:
    """The kernel."""
    kind, fn = required(operands, 0, 5)
    copies, width = int(kind.shape[1]), int(kind.shape[2])
    bound = bound_of(kind.shape[0], bounds)
    rows, columns = (int(dim) for dim in fn.shape)

    def emit(body: Body) -> None:
        stream, y, post, comb, pre, panels, scale, base, weight = body.operands
        updated, *entered = body.results[: len(body.results) - 3]
        product = packed.Weight(fn.dtype, rows, columns, panels, None, target)
        inputs = (updated, scale, base)
        coefficients = Coefficients(op.entry.coefficients, product, copies, inputs, body.results[-3:])
        entry = Entry(op, pre, weight, entered, copies, width)

        def update(row: Expr) -> None:
            row = tir.let(row)
            begin, start = tir.let(row * (copies * width)), tir.let(row * width)
            gains = [tir.let(post[row * copies + copy]) for copy in range(copies)]
            mixes = [tir.let(comb[row * (copies * copies) + index]) for index in range(copies * copies)]

            def new_columns(row: Expr, i: Expr, lanes: int) -> list[Expr]:
                added = tir.let(tir.load(y, start + i, lanes))
                sources = [tir.let(tir.load(stream, begin + copy * width + i, lanes)) for copy in range(copies)]
                values = []
                for copy in range(copies):
                    total = tir.product(tir.splat(mixes[copy], lanes), sources[0])
                    for source in range(1, copies):
                        mixed = tir.product(tir.splat(mixes[source * copies + copy], lanes), sources[source])
                        total = tir.let(total + mixed)
                    value = tir.let(tir.product(tir.splat(gains[copy], lanes), added) + total)
                    tir.store(updated, begin + copy * width + i, value)
                    values.append(tir.let(tir.bf16(value)) if kind.dtype == "bf16" else value)
                return values

            entry.row(row, new_columns)

        count = body.size(kind.shape[0])
        if bound <= 1:
            coefficients.tokens(count, update)
        else:
            coefficients.chunk(count, bound, update)

    return build_kernel(emit, op, operands, results, bounds, layouts=weight_layouts(op, fn, target, 5, -1))
