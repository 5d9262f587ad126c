"""Elementwise sum."""

from __future__ import annotations

from v41c.codegen.onnx.body import Body, Term
from v41c.ir.ops.add import Add


def body(f: Body, op: Add, x: Term, y: Term) -> Term:
    """The sum in f32."""
    return x.wide + y.wide
