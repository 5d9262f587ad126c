"""Gated activation of gate and up side by side."""

from __future__ import annotations

from v41c.codegen.onnx.body import Body, Term
from v41c.ir.ops.swiglu_halves import SwigluHalves


def body(f: Body, op: SwigluHalves, x: Term) -> Term:
    """In f32."""
    half = int(x.shape[1]) // 2
    gate, up = f.many("Split", 2, x.wide, [half, half], axis=-1)
    # the operator Sigmoid may be an approximation that is coarse far below 0
    return gate / (f.Exp(-gate) + 1.0) * up
