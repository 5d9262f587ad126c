"""Token embedding: one table row per token."""

from __future__ import annotations

from v41c.codegen.onnx.body import Body, Term
from v41c.ir.ops.embedding import Embedding


def body(f: Body, op: Embedding, tokens: Term, table: Term) -> Term:
    """As stored."""
    return f.Gather(table, tokens)
