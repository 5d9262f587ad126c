"""A learned offset for every column."""

from __future__ import annotations

from v41c.codegen.onnx.body import Body, Term
from v41c.ir.ops.add_bias import AddBias


def body(f: Body, op: AddBias, x: Term, bias: Term) -> Term:
    """The sum in f32."""
    return x.wide + bias.wide
