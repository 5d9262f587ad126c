"""Matrix product with a stored weight."""

from __future__ import annotations

from v41c.codegen.onnx.body import Body, Term
from v41c.codegen.onnx.formats import row_values, weight_values
from v41c.ir.ops.linear import Linear


def body(f: Body, op: Linear, x: Term, weight: Term, scale: Term | None = None) -> Term:
    """In f32, with the weight's exact value."""
    return f.MatMul(row_values(f, x).wide, f.Transpose(weight_values(f, weight, scale), perm=[1, 0]))
