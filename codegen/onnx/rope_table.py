"""Rotation angles of rotary position embedding."""

from __future__ import annotations

from v41c.codegen.onnx.body import Body, Term
from v41c.ir.ops.rope_table import RopeTable


def body(f: Body, op: RopeTable, positions: Term) -> tuple[Term, Term]:
    """The frequencies are constants."""
    position = f.Max(positions.wide + op.offset, 0).to(f.term(0.0).dtype)
    angle = f.column(position) * op.frequencies().numpy()
    return f.Cos(angle), f.Sin(angle)
