"""Collapse of the residual copies to one sublayer input."""

from __future__ import annotations

from v41c.codegen.onnx.body import Body, Term
from v41c.ir.ops.hc_mix import HcMix


def body(f: Body, op: HcMix, stream: Term, pre: Term) -> Term:
    """Weighted sum of the copies, in f32."""
    return f.ReduceSum(f.Unsqueeze(pre, [-1]) * stream.wide, [1], keepdims=0)
