"""Another shape for the axes after the first."""

from __future__ import annotations

from v41c.codegen.onnx.body import Body, Term
from v41c.ir.ops.reshape import Reshape


def body(f: Body, op: Reshape, x: Term) -> Term:
    """As stored."""
    return f.Reshape(x, [0, *op.shape])
