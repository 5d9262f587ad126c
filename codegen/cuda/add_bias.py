"""A learned offset for every column: the sum of `add` with one row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from v41c.codegen.cuda.add import launch_sum
from v41c.codegen.cuda.frame import Frame
from v41c.codegen.cuda.kernel import CudaKernel
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
    """x [T, M] and bias [M] to [T, M]."""
    frame = Frame(op, operands, results, bounds)
    launch_sum(frame, "bias", one_row=True)
    return frame.kernel()
