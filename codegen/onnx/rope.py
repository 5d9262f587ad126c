"""Rotary position embedding of the last axes, adjacent pairs."""

from __future__ import annotations

from v41c.codegen.onnx.body import Body, Term
from v41c.ir.ops.rope import Rope


def body(f: Body, op: Rope, x: Term, cos: Term, sin: Term) -> Term:
    """What is not rotated is kept as stored."""
    rotated, width = 2 * int(cos.shape[1]), int(x.shape[-1])
    kept = None
    tail = x
    if rotated < width:
        kept, tail = f.many("Split", 2, x, [width - rotated, rotated], axis=-1)
    if len(x.shape) == 3:
        cos, sin = f.column(cos), f.column(sin)
    if op.inverse:
        sin = -sin
    a, b = (f.Squeeze(part, [-1]) for part in f.many("Split", 2, f.split_last(tail.wide, 2), [1, 1], axis=-1))
    turned = f.join_last(f.stack_last(a * cos - b * sin, a * sin + b * cos)).to(x.dtype)
    return turned if kept is None else f.Concat(kept, turned, axis=-1)
