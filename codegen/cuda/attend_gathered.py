"""Attention with its rotations over selected rows that were gathered before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from v41c.codegen.cuda.attention_launch import add_attention
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
    """q [T, H, HD] to the same type, and kv [T, HD] into window [S, W, row]."""
    frame = Frame(op, operands, results, bounds)
    add_attention(frame, target, causal=True, writes=True)
    return frame.kernel()
