"""Token ids in the Engram's smaller id space."""

from __future__ import annotations

from v41c.codegen.onnx.body import Body, Term
from v41c.ir.ops.compress_tokens import CompressTokens


def body(f: Body, op: CompressTokens, tokens: Term, table: Term) -> Term:
    """A lookup, −1 for the image token."""
    return f.Where(f.Equal(tokens.wide, op.image_token), -1, f.Gather(table, tokens).wide)
