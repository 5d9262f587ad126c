"""Gated activation of gate and up side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from v41c.codegen.cpu.frame import Body, bound_of, build_kernel
from v41c.codegen.cpu.numeric import silu
from v41c.codegen.cpu.sparse import Types, required
from v41c.codegen.cpu.tir import Expr, each, let, load, parallel, product, store
from v41c.codegen.kernel import CpuKernel
from v41c.ir.ops.swiglu_halves import SwigluHalves
from v41c.ir.types import TensorType

if TYPE_CHECKING:
    from v41c.targets.target import CpuTarget


def kernel(
    op: SwigluHalves, operands: Types, results: tuple[TensorType, ...], target: CpuTarget, bounds: Mapping[str, int]
) -> CpuKernel:
    """The kernel."""
    (kind,) = required(operands, 0)
    width = int(kind.shape[1]) // 2

    def emit(body: Body) -> None:
        (x,), (out,) = body.operands, body.results
        with parallel(body.size(kind.shape[0]), 16 * bound_of(kind.shape[0], bounds) * width) as row:
            start = let(row * width)

            def activate(i: Expr, lanes: int) -> None:
                gate, up = let(load(x, 2 * start + i, lanes)), let(load(x, 2 * start + i + width, lanes))
                store(out, start + i, product(silu(gate), up))

            each(width, activate)

    return build_kernel(emit, op, operands, results, bounds)
