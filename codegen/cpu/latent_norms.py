"""The norms of the query latent and of the window keys: every step of a row in place, in the first-level cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from v41c.codegen.cpu.frame import Body, bound_of, build_kernel
from v41c.codegen.cpu.quantize import round_trip_run
from v41c.codegen.cpu.rms_norm import norm_row
from v41c.codegen.cpu.rope import rotate
from v41c.codegen.cpu.sparse import Types, required
from v41c.codegen.cpu.tir import let, parallel
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
        query, window = body.results
        work = _WORK * bound_of(latent.shape[0], bounds) * (rank + width)
        with parallel(body.size(latent.shape[0]), work) as row:
            start = let(row * rank)
            norm_row(q, q_weight, query, start, rank, op.eps)
            if op.q_format != "none":
                round_trip_run(query, query, start, rank, formats.FORMATS[op.q_format])
            start = let(row * width)
            norm_row(kv, kv_weight, window, start, width, op.eps)
            tail, angle = let(start + width - 2 * pairs), let(row * pairs)
            rotate(window, window, tail, (tables[0], tables[1]), angle, pairs, inverse=False)
            if op.kv_format != "none":
                round_trip_run(window, window, start, width, formats.FORMATS[op.kv_format])

    return build_kernel(emit, op, operands, results, bounds)
