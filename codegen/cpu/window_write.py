"""Window keys into the ring of their sequence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from v41c.codegen.cpu.frame import Body, bound_of, build_kernel
from v41c.codegen.cpu.rows import write_rows
from v41c.codegen.cpu.sparse import Types, required
from v41c.codegen.cpu.tir import Expr, cast
from v41c.codegen.kernel import CpuKernel
from v41c.ir.ops.window_write import WindowWrite
from v41c.ir.types import TensorType

if TYPE_CHECKING:
    from v41c.targets.target import CpuTarget


def kernel(
    op: WindowWrite, operands: Types, results: tuple[TensorType, ...], target: CpuTarget, bounds: Mapping[str, int]
) -> CpuKernel:
    """The kernel."""
    window, kv = required(operands, 0, 1)
    length = int(window.shape[1])

    def emit(body: Body) -> None:
        ring, x, positions, slots = body.operands

        def row_of(token: Expr) -> Expr:
            return cast(slots[token], "int64") * length + cast(positions[token], "int64") % length

        write_rows(
            ring,
            window,
            "fp8_e8m0_32",
            x,
            int(kv.shape[1]),
            body.size(kv.shape[0]),
            bound_of(kv.shape[0], bounds),
            row_of,
        )

    return build_kernel(emit, op, operands, results, bounds)
