"""Low-rank output projection of head groups, rounded where it is summed: no value is read again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from v41c.codegen.cuda.frame import Frame
from v41c.codegen.cuda.kernel import CudaKernel
from v41c.codegen.cuda.linear import launch_linear
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
    """x [T, G, K] and weight [G · M, K] to the round trip of y [T, G · M]."""
    frame = Frame(op, operands, results, bounds)
    launch_linear(frame, target, int(frame.type_of("x").shape[1]), str(op.attributes()["format"]))
    return frame.kernel()
