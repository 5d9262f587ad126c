"""Quantisation to a group-scaled format, kept packed."""

from __future__ import annotations

from v41c.codegen.onnx.body import Body, Term
from v41c.codegen.onnx.formats import pack
from v41c.ir.ops.pack_rows import PackRows


def body(f: Body, op: PackRows, x: Term) -> Term:
    """Codes, then scales."""
    return f.call(pack, x, format=op.format)
