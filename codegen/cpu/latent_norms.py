"""The norms of the query latent and of the window keys: every step of a row in place, in the first-level cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from v41c.codegen.cpu.frame import Body, bound_of, build_kernel
from v41c.codegen.cpu.quantize import round_trip_run
from v41c.codegen.cpu.rms_norm import norm_row
from v41c.codegen.cpu.rope import rotate
from v41c.codegen.cpu.sparse import Types, required
from v41c.codegen.cpu.tir import Buffer, Expr, let, parallel
from v41c.codegen.kernel import CpuKernel
from v41c.ir import formats
from v41c.ir.ops.latent_norms import LatentNorms
from v41c.ir.types import TensorType

if TYPE_CHECKING:
    from v41c.targets.target import CpuTarget

_WORK = 12  # multiply-adds that an element is worth


def kernel(
    op: LatentNorms, operands: Types, results: tuple[TensorType, ...], target: CpuTarget, bounds: Mapping[str, int]
) -> CpuKernel:
    """The kernel."""
    latent, keys, cos = required(operands, 0, 2, 4)
    rank, width, pairs = int(latent.shape[1]), int(keys.shape[1]), int(cos.shape[1])

    def emit(body: Body) -> None:
        q, q_weight, kv, kv_weight, *tables = body.operands
        rows = LatentRows((q, kv), (q_weight, kv_weight), (tables[0], tables[1]), body.results, (rank, width), pairs)
        rows.emit(body.size(latent.shape[0]), bound_of(latent.shape[0], bounds), op)

    return build_kernel(emit, op, operands, results, bounds)


@dataclass(frozen=True)
class LatentRows:
    """Rows of the query latent and of the window keys: where they come from, weights, rotation, where they go.

    `ahead`: elements before the first row of keys in its source.
    """

    sources: tuple[Buffer, Buffer]
    weights: tuple[Buffer, Buffer]
    tables: tuple[Buffer, Buffer]
    results: Sequence[Buffer]
    widths: tuple[int, int]
    pairs: int
    ahead: int = 0

    def emit(self, tokens: Expr, bound: int, op: LatentNorms) -> None:
        """A row of both is one task."""
        (q, kv), (query, window), (rank, width) = self.sources, self.results, self.widths
        with parallel(tokens, _WORK * bound * (rank + width)) as row:
            start = let(row * rank)
            norm_row(q, self.weights[0], query, start, rank, op.eps)
            if op.q_format != "none":
                round_trip_run(query, query, start, rank, formats.FORMATS[op.q_format])
            start = let(row * width)
            norm_row(kv, self.weights[1], window, start, width, op.eps, ahead=self.ahead)
            tail, angle = let(start + width - 2 * self.pairs), let(row * self.pairs)
            rotate(window, window, tail, self.tables, angle, self.pairs, inverse=False)
            if op.kv_format != "none":
                round_trip_run(window, window, start, width, formats.FORMATS[op.kv_format])
