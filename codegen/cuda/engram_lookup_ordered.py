"""Rows of an Engram table, read in their order: equal ones stand side by side, and come from the cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from v41c.codegen.cuda.engram_lookup import launch_lookup
from v41c.codegen.cuda.frame import Frame
from v41c.codegen.cuda.kernel import CudaKernel

if TYPE_CHECKING:
    from v41c.ir.op import Op
    from v41c.ir.types import TensorType
    from v41c.targets.cuda import CudaTarget


def kernel(
    op: Op,
    operands: Sequence[TensorType | None],
    results: Sequence[TensorType],
    target: CudaTarget,
    bounds: Mapping[str, int],
) -> CudaKernel:
    """out [T, Q · W] of rows [T, Q], their places [T, Q] and table [R, W]."""
    frame = Frame(op, operands, results, bounds)
    launch_lookup(frame, frame.operand("places"))
    return frame.kernel()
