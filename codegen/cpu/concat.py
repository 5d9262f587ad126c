"""Two tensors side by side, copied row by row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from v41c.codegen.cpu.frame import Body, bound_of, build_kernel
from v41c.codegen.cpu.sparse import Types, required
from v41c.codegen.cpu.tir import copy_run, let, parallel
from v41c.codegen.kernel import CpuKernel
from v41c.ir.ops.concat import Concat
from v41c.ir.types import TensorType

if TYPE_CHECKING:
    from v41c.targets.target import CpuTarget


def kernel(
    op: Concat, operands: Types, results: tuple[TensorType, ...], target: CpuTarget, bounds: Mapping[str, int]
) -> CpuKernel:
    """The kernel."""
    left, right = required(operands, 0, 1)
    widths = (int(left.shape[1]), int(right.shape[1]))
    total = sum(widths)

    def emit(body: Body) -> None:
        (out,) = body.results
        with parallel(body.size(left.shape[0]), bound_of(left.shape[0], bounds) * total // 4) as row:
            for source, width, place in zip(body.operands, widths, (0, widths[0]), strict=True):
                copy_run(source, let(row * width), out, let(row * total + place), width)

    return build_kernel(emit, op, operands, results, bounds)
