"""A learned offset for every column, rounded once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from v41c.codegen.cpu.frame import Body, bound_of, build_kernel
from v41c.codegen.cpu.sparse import Types, required
from v41c.codegen.cpu.tir import each, let, load, parallel, store
from v41c.codegen.kernel import CpuKernel
from v41c.ir.ops.add_bias import AddBias
from v41c.ir.types import TensorType

if TYPE_CHECKING:
    from v41c.targets.target import CpuTarget


def kernel(
    op: AddBias, operands: Types, results: tuple[TensorType, ...], target: CpuTarget, bounds: Mapping[str, int]
) -> CpuKernel:
    """The kernel."""
    (kind,) = required(operands, 0)
    width = int(kind.shape[1])

    def emit(body: Body) -> None:
        (x, bias), (out,) = body.operands, body.results
        with parallel(body.size(kind.shape[0]), bound_of(kind.shape[0], bounds) * width) as row:
            start = let(row * width)
            each(width, lambda i, lanes: store(out, start + i, load(x, start + i, lanes) + load(bias, i, lanes)))

    return build_kernel(emit, op, operands, results, bounds)
