"""The residual stream after the embedding: equal copies, and a mix that reads the first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from v41c.codegen.cpu.frame import Body, bound_of, build_kernel
from v41c.codegen.cpu.sparse import Types, required
from v41c.codegen.cpu.tir import const, copy_run, let, parallel, put
from v41c.codegen.kernel import CpuKernel
from v41c.ir.ops.start_stream import StartStream
from v41c.ir.types import TensorType

if TYPE_CHECKING:
    from v41c.targets.target import CpuTarget


def kernel(
    op: StartStream, operands: Types, results: tuple[TensorType, ...], target: CpuTarget, bounds: Mapping[str, int]
) -> CpuKernel:
    """The kernel."""
    (kind,) = required(operands, 0)
    width, copies = int(kind.shape[1]), op.copies

    def emit(body: Body) -> None:
        (x,), (stream, mix) = body.operands, body.results
        with parallel(body.size(kind.shape[0]), bound_of(kind.shape[0], bounds) * copies * width // 4) as row:
            begin = let(row * width)
            for copy in range(copies):
                put(mix, row * copies + copy, const(1.0 if copy == 0 else 0.0))
                end = let(row * (copies * width) + copy * width)
                copy_run(x, begin, stream, end, width)

    return build_kernel(emit, op, operands, results, bounds)
