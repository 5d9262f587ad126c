"""A sublayer boundary in one launch: y and the stream are read once, the new stream and u written once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from v41c.codegen.cuda.frame import Frame
from v41c.codegen.cuda.kernel import CudaKernel
from v41c.codegen.cuda.mhc import entered, launch_boundary
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
    """stream [T, N, D] and y [T, D] to the new stream, u [T, D], its round trip, and the next coefficients."""
    frame = Frame(op, operands, results, bounds)
    read = {name: frame.operand(name) for name in ("y", "post", "comb", "pre", "weight")}
    launch_boundary(frame, read | {"updated": frame.result(0)} | entered(frame, 1))
    return frame.kernel()
