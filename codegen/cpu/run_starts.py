"""Where each token's run starts in the step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tvm.script.ir_builder import tirx as T

from v41c.codegen.cpu.frame import Body, build_kernel
from v41c.codegen.cpu.sparse import Types, required
from v41c.codegen.cpu.tir import cast, local, loop, put, when
from v41c.codegen.kernel import CpuKernel
from v41c.ir.ops.run_starts import RunStarts
from v41c.ir.types import TensorType

if TYPE_CHECKING:
    from v41c.targets.target import CpuTarget


def kernel(
    op: RunStarts, operands: Types, results: tuple[TensorType, ...], target: CpuTarget, bounds: Mapping[str, int]
) -> CpuKernel:
    """The kernel."""
    (kind,) = required(operands, 0)

    def emit(body: Body) -> None:
        (positions, slots), (out,) = body.operands, body.results
        start = local(T.int64(0))
        with loop(body.size(kind.shape[0])) as row:
            with when(row > 0):
                follows = T.And(slots[row] == slots[row - 1], positions[row] == positions[row - 1] + 1)
                start.set(T.Select(follows, start.value, row))
            put(out, row, cast(start.value, "int32"))

    return build_kernel(emit, op, operands, results, bounds)
