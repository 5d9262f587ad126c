"""Clamped gated activation."""

from __future__ import annotations

from v41c.codegen.onnx.body import Body, Term
from v41c.ir.ops.swiglu import Swiglu


def body(f: Body, op: Swiglu, gate: Term, up: Term) -> Term:
    """In f32."""
    return gated(f, gate.wide, up.wide, op.limit)


def gated(f: Body, gate: Term, up: Term, limit: float) -> Term:
    """silu(min(gate, limit)) · clamp(up, −limit, limit) of f32 terms."""
    clamped = f.Min(gate, limit)
    # the operator Sigmoid may be an approximation that is coarse far below 0
    return clamped / (f.Exp(-clamped) + 1.0) * f.Clip(up, -limit, limit)
