"""Gaussian error linear unit, exact."""

from __future__ import annotations

from v41c.codegen.onnx.body import Body, Term
from v41c.ir.ops.gelu import Gelu


def body(f: Body, op: Gelu, x: Term) -> Term:
    """A standard operator, in f32."""
    return f.Gelu(x.wide)
