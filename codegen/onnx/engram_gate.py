"""Gated addition of Engram values to the residual stream."""

from __future__ import annotations

from v41c.codegen.onnx.body import Body, Term
from v41c.ir.ops.engram_gate import EngramGate


def body(
    f: Body, op: EngramGate, stream: Term, kv: Term, q_weight: Term, k_weight: Term, image: Term | None = None
) -> Term:
    """As the formula, in f32."""
    copies, width = (int(dim) for dim in stream.shape[1:])
    x = stream.wide
    k, v = f.many("Split", 2, f.Reshape(kv.wide, [0, copies + 1, width]), [copies, 1], axis=1)
    dot = f.ReduceSum(x * q_weight.wide * k_weight.wide * k, [-1], keepdims=0) * width**-0.5
    s = dot / (_rms(f, x, op.eps) * _rms(f, k, op.eps))
    root = f.Sqrt(f.Max(f.Abs(s), 1e-6))
    gate = f.Sigmoid(f.Where(f.sign_bit(s), -root, root))
    if image is not None:
        gate = f.Where(f.column(image), 0.0, gate)
    return x + f.Unsqueeze(gate, [-1]) * v


def _rms(f: Body, x: Term, eps: float) -> Term:
    return f.Sqrt(f.ReduceMean(x * x, [-1], keepdims=0) + eps)
