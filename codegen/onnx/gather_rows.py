"""The rows of a step that get logits."""

from __future__ import annotations

from v41c.codegen.onnx.body import Body, Term
from v41c.ir.ops.gather_rows import GatherRows


def body(f: Body, op: GatherRows, x: Term, rows: Term) -> Term:
    """As stored."""
    return f.Gather(x, rows)
