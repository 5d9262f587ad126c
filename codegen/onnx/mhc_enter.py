"""The entry of a sublayer: its parts."""

from __future__ import annotations

from v41c.codegen.onnx import apply
from v41c.codegen.onnx.body import Body, Term
from v41c.ir.ops.mhc_enter import MhcEnter
from v41c.ir.ops.round_trip import RoundTrip


def body(
    f: Body, op: MhcEnter, stream: Term, pre: Term, fn: Term, scale: Term, base: Term, weight: Term
) -> tuple[Term, ...]:
    """As the reference composes them."""
    mix, norm, coefficients = op.parts()
    (u,) = apply(f, norm, *apply(f, mix, stream, pre), weight)
    quantized = () if op.format == "none" else apply(f, RoundTrip(op.format), u)
    return u, *quantized, *apply(f, coefficients, stream, fn, scale, base)
