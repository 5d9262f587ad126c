"""A sublayer boundary: its parts."""

from __future__ import annotations

from v41c.codegen.onnx import apply
from v41c.codegen.onnx.body import Body, Term
from v41c.ir.ops.mhc_boundary import MhcBoundary
from v41c.ir.ops.round_trip import RoundTrip


def body(
    f: Body,
    op: MhcBoundary,
    stream: Term,
    y: Term,
    post: Term,
    comb: Term,
    pre: Term,
    fn: Term,
    scale: Term,
    base: Term,
    weight: Term,
) -> tuple[Term, ...]:
    """As the reference composes them."""
    update, mix, norm, coefficients = op.parts()
    (updated,) = apply(f, update, stream, y, post, comb)
    (u,) = apply(f, norm, *apply(f, mix, updated, pre), weight)
    quantized = () if op.format == "none" else apply(f, RoundTrip(op.format), u)
    return updated, u, *quantized, *apply(f, coefficients, updated, fn, scale, base)
