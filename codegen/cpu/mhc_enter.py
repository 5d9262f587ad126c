"""The entry of a sublayer: the stream is read once, u written once."""

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
from v41c.ir.ops.mhc_enter import MhcEnter
from v41c.ir.types import TensorType

if TYPE_CHECKING:
    from v41c.targets.target import CpuTarget


def kernel(
    op: MhcEnter, operands: Types, results: tuple[TensorType, ...], target: CpuTarget, bounds: Mapping[str, int]
) -> CpuKernel:
    """The kernel."""
    kind, fn = required(operands, 0, 2)
    copies, width = int(kind.shape[1]), int(kind.shape[2])
    bound = bound_of(kind.shape[0], bounds)
    rows, columns = (int(dim) for dim in fn.shape)

    def emit(body: Body) -> None:
        stream, pre, panels, scale, base, weight = body.operands
        product = packed.Weight(fn.dtype, rows, columns, panels, None, target)
        inputs = (stream, scale, base)
        coefficients = Coefficients(op.coefficients, product, copies, inputs, body.results[-3:])
        entry = Entry(op, pre, weight, body.results[:-3], copies, width)

        def read_columns(row: Expr, i: Expr, lanes: int) -> list[Expr]:
            begin = tir.let(row * (copies * width))
            return [tir.let(tir.load(stream, begin + copy * width + i, lanes)) for copy in range(copies)]

        def enter(row: Expr) -> None:
            entry.row(row, read_columns)

        count = body.size(kind.shape[0])
        if bound <= 1:
            coefficients.tokens(count, enter)
        else:
            coefficients.chunk(count, bound, enter)

    return build_kernel(emit, op, operands, results, bounds, layouts=weight_layouts(op, fn, target, 2, -1))
