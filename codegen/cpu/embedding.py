"""Token embedding: one row of the table per token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from v41c.codegen.cpu.frame import Body, bound_of, build_kernel
from v41c.codegen.cpu.sparse import Types, required
from v41c.codegen.cpu.tir import cast, each, let, load, parallel, store
from v41c.codegen.kernel import CpuKernel
from v41c.ir.ops.embedding import Embedding
from v41c.ir.types import TensorType

if TYPE_CHECKING:
    from v41c.targets.target import CpuTarget


def kernel(
    op: Embedding, operands: Types, results: tuple[TensorType, ...], target: CpuTarget, bounds: Mapping[str, int]
) -> CpuKernel:
    """The kernel."""
    tokens_type, table_type = required(operands, 0, 1)
    width = int(table_type.shape[1])

    def emit(body: Body) -> None:
        (tokens, table), (out,) = body.operands, body.results
        with parallel(body.size(tokens_type.shape[0]), bound_of(tokens_type.shape[0], bounds) * width // 4) as row:
            begin, end = let(cast(tokens[row], "int64") * width), let(row * width)
            each(width, lambda i, lanes: store(out, end + i, load(table, begin + i, lanes)))

    return build_kernel(emit, op, operands, results, bounds)
