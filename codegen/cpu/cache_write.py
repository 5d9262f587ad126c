"""Compressed rows and index keys into their global cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tvm.script.ir_builder import tirx as T

from v41c.codegen.cpu.frame import Body, bound_of, build_kernel
from v41c.codegen.cpu.rows import write_rows
from v41c.codegen.cpu.sparse import Types, required
from v41c.codegen.cpu.tir import Expr, cast
from v41c.codegen.kernel import CpuKernel
from v41c.ir.ops.cache_write import CacheWrite
from v41c.ir.types import TensorType

if TYPE_CHECKING:
    from v41c.targets.target import CpuTarget


def kernel(
    op: CacheWrite, operands: Types, results: tuple[TensorType, ...], target: CpuTarget, bounds: Mapping[str, int]
) -> CpuKernel:
    """The kernel."""
    cache, x = required(operands, 0, 1)

    def emit(body: Body) -> None:
        rows, values, positions, slots, kept = body.operands

        def row_of(token: Expr) -> Expr:
            return cast(slots[token], "int64") * body.size(cache.shape[1]) + cast(positions[token] // op.ratio, "int64")

        write_rows(
            rows,
            cache,
            op.format,
            values,
            int(x.shape[1]),
            body.size(x.shape[0]),
            bound_of(x.shape[0], bounds),
            row_of,
            lambda token: T.And(positions[token] % op.ratio == op.ratio - 1, positions[token] >= kept[token]),
        )

    return build_kernel(emit, op, operands, results, bounds)
