"""Compressed ids into the Engram history of their sequence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from v41c.codegen.cpu.frame import Body, build_kernel
from v41c.codegen.cpu.sparse import Types, required
from v41c.codegen.cpu.tir import cast, loop, put
from v41c.codegen.kernel import CpuKernel
from v41c.ir.ops.history_write import HistoryWrite
from v41c.ir.types import TensorType

if TYPE_CHECKING:
    from v41c.targets.target import CpuTarget


def kernel(
    op: HistoryWrite, operands: Types, results: tuple[TensorType, ...], target: CpuTarget, bounds: Mapping[str, int]
) -> CpuKernel:
    """The kernel."""
    history, ids = required(operands, 0, 1)
    length = int(history.shape[1])

    def emit(body: Body) -> None:
        ring, source, positions, slots = body.operands
        with loop(body.size(ids.shape[0])) as token:
            place = cast(slots[token], "int64") * length + cast(positions[token], "int64") % length
            put(ring, place, source[token])

    return build_kernel(emit, op, operands, results, bounds)
