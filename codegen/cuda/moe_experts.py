"""The routed experts of a token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from v41c.codegen.cuda.experts import Experts
from v41c.codegen.cuda.frame import Frame
from v41c.codegen.cuda.kernel import CudaKernel
from v41c.ir.ops.moe_experts import MoeExperts
from v41c.ir.types import TensorType
from v41c.targets.cuda import CudaTarget


def kernel(
    op: MoeExperts,
    operands: Sequence[TensorType | None],
    results: Sequence[TensorType],
    target: CudaTarget,
    bounds: Mapping[str, int],
) -> CudaKernel:
    """out f32 [T, D] of x [T, D], ids and weights [T, k], stacks w1, w3 [E, M, D] and w2 [E, D, M]."""
    return Experts(Frame(op, operands, results, bounds), op.limit, op.format).kernel(target)
