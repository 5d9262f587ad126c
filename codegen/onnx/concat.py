"""Two tensors side by side."""

from __future__ import annotations

from v41c.codegen.onnx.body import Body, Term
from v41c.ir.ops.concat import Concat


def body(f: Body, op: Concat, x: Term, y: Term) -> Term:
    """As stored."""
    return f.Concat(x, y, axis=1)
