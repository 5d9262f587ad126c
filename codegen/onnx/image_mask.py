"""Which tokens belong to an image span."""

from __future__ import annotations

from v41c.codegen.onnx.body import Body, Term
from v41c.ir.ops.image_mask import ImageMask


def body(f: Body, op: ImageMask, tokens: Term) -> Term:
    """A comparison."""
    return f.Equal(tokens.wide, op.image_token)
