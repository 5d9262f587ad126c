"""A copy under another shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from v41c.codegen.cpu.frame import Body, bound_of, build_kernel
from v41c.codegen.cpu.sparse import Types, required
from v41c.codegen.cpu.tir import at, each, parallel, put
from v41c.codegen.kernel import CpuKernel
from v41c.ir.op import product
from v41c.ir.ops.reshape import Reshape
from v41c.ir.types import TensorType

if TYPE_CHECKING:
    from v41c.targets.target import CpuTarget


def kernel(
    op: Reshape, operands: Types, results: tuple[TensorType, ...], target: CpuTarget, bounds: Mapping[str, int]
) -> CpuKernel:
    """The kernel."""
    (x,) = required(operands, 0)
    width = product(*x.shape[1:])

    def emit(body: Body) -> None:
        (source,), (out,) = body.operands, body.results
        with parallel(body.size(x.shape[0]), bound_of(x.shape[0], bounds) * width // 8) as token:
            each(width, lambda i, lanes: put(out, token * width + i, source[at(token * width + i, lanes)]))

    return build_kernel(emit, op, operands, results, bounds)
