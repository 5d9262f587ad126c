"""A mixture of experts behind its router: the shared expert beside the routed ones, in the same launches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from v41c.codegen.cuda.experts import Experts
from v41c.codegen.cuda.frame import Frame
from v41c.codegen.cuda.kernel import CudaKernel
from v41c.ir.ops.moe_layer import MoeLayer
from v41c.ir.types import TensorType
from v41c.targets.cuda import CudaTarget


def kernel(
    op: MoeLayer,
    operands: Sequence[TensorType | None],
    results: Sequence[TensorType],
    target: CudaTarget,
    bounds: Mapping[str, int],
) -> CudaKernel:
    """out [T, D] of what `moe_experts` takes, and shared_x [T, D] with the shared expert's three matrices."""
    frame = Frame(op, operands, results, bounds)
    return Experts(frame, op.limit, op.format, op.shared_format, op.out).kernel(target)
