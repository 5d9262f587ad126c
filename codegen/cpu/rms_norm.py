"""Root-mean-square normalisation of rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from v41c.codegen.cpu.frame import Body, bound_of, build_kernel
from v41c.codegen.cpu.sparse import Types, required
from v41c.codegen.cpu.tir import (
    Buffer,
    Expr,
    const,
    each,
    let,
    load,
    parallel,
    product,
    splat,
    sqrt,
    store,
    sum_squares,
)
from v41c.codegen.kernel import CpuKernel
from v41c.ir.ops.rms_norm import RmsNorm
from v41c.ir.types import TensorType

if TYPE_CHECKING:
    from v41c.targets.target import CpuTarget


def kernel(
    op: RmsNorm, operands: Types, results: tuple[TensorType, ...], target: CpuTarget, bounds: Mapping[str, int]
) -> CpuKernel:
    """The kernel."""
    (kind,) = required(operands, 0)
    width = int(kind.shape[1])

    def emit(body: Body) -> None:
        (x, weight), (out,) = body.operands, body.results
        with parallel(body.size(kind.shape[0]), 2 * bound_of(kind.shape[0], bounds) * width) as row:
            norm_row(x, weight, out, let(row * width), width, op.eps)

    return build_kernel(emit, op, operands, results, bounds)


def norm_row(x: Buffer, weight: Buffer, out: Buffer, start: Expr, width: int, eps: float, *, ahead: int = 0) -> None:
    """out[start …] = the norm of x[start + ahead …]."""
    source = let(start + ahead)
    mean = let(sum_squares(x, source, width) / const(float(width)))
    inverse = let(const(1.0) / sqrt(mean + const(eps)))

    def norm(i: Expr, lanes: int) -> None:
        scaled = product(load(x, source + i, lanes), splat(inverse, lanes))
        store(out, start + i, product(load(weight, i, lanes), scaled))

    each(width, norm)
