"""Quantisation to a group-scaled format and back."""

from __future__ import annotations

from v41c.codegen.onnx import formats
from v41c.codegen.onnx.body import Body, Term
from v41c.ir.ops.round_trip import RoundTrip


def body(f: Body, op: RoundTrip, x: Term) -> Term:
    """As the formats spell it out."""
    return formats.round_trip(f, x, op.format)
