"""Update of the residual stream by a sublayer's output."""

from __future__ import annotations

from v41c.codegen.onnx.body import Body, Term
from v41c.ir.ops.hc_update import HcUpdate


def body(f: Body, op: HcUpdate, stream: Term, y: Term, post: Term, comb: Term) -> Term:
    """`comb` is [source, target]: its transpose mixes the copies."""
    mixed = f.MatMul(f.Transpose(comb, perm=[0, 2, 1]), stream.wide)
    return f.Unsqueeze(post, [-1]) * f.Unsqueeze(y.wide, [1]) + mixed
