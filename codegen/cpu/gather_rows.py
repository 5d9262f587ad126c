"""The rows of a step that get logits, copied."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from v41c.codegen.cpu.frame import Body, bound_of, build_kernel
from v41c.codegen.cpu.sparse import Types, required
from v41c.codegen.cpu.tir import cast, copy_run, let, parallel
from v41c.codegen.kernel import CpuKernel
from v41c.ir.ops.gather_rows import GatherRows
from v41c.ir.types import TensorType

if TYPE_CHECKING:
    from v41c.targets.target import CpuTarget


def kernel(
    op: GatherRows, operands: Types, results: tuple[TensorType, ...], target: CpuTarget, bounds: Mapping[str, int]
) -> CpuKernel:
    """The kernel."""
    x_type, rows_type = required(operands, 0, 1)
    width = int(x_type.shape[1])

    def emit(body: Body) -> None:
        (x, rows), (out,) = body.operands, body.results
        with parallel(body.size(rows_type.shape[0]), bound_of(rows_type.shape[0], bounds) * width // 4) as row:
            begin, end = let(cast(rows[row], "int64") * width), let(row * width)
            copy_run(x, begin, out, end, width)

    return build_kernel(emit, op, operands, results, bounds)
