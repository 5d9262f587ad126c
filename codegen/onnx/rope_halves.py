"""Rotary position embedding that pairs the halves of a head."""

from __future__ import annotations

from v41c.codegen.onnx.body import Body, Term
from v41c.ir.ops.rope_halves import RopeHalves


def body(f: Body, op: RopeHalves, x: Term, cos: Term, sin: Term) -> Term:
    """What is not rotated is kept as stored."""
    heads, half = int(x.shape[1]), int(x.shape[2]) // 2
    turned, kept = x, None
    if op.heads < heads:
        turned, kept = f.many("Split", 2, x, [op.heads, heads - op.heads], axis=1)
    cos, sin = f.column(cos), f.column(sin)
    a, b = f.many("Split", 2, turned.wide, [half, half], axis=-1)
    rotated = f.Concat(a * cos - b * sin, b * cos + a * sin, axis=-1).to(x.dtype)
    return rotated if kept is None else f.Concat(rotated, kept, axis=1)
