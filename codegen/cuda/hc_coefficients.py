"""Coefficients of a residual mixing: one launch, the last block of a tile of tokens makes them of partial sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from v41c.codegen.cuda.frame import Frame
from v41c.codegen.cuda.kernel import CudaKernel
from v41c.codegen.cuda.mhc import launch_boundary
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
    """stream [T, N, D] to pre [T, N], post [T, N] and comb [T, N, N]."""
    frame = Frame(op, operands, results, bounds)
    coefficients = {"next_pre": frame.result(0), "next_post": frame.result(1), "next_comb": frame.result(2)}
    launch_boundary(frame, coefficients)
    return frame.kernel()
