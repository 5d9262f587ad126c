"""Rows of an Engram table, dequantised."""

from __future__ import annotations

from v41c.codegen.onnx.body import Body, Term
from v41c.ir.ops.engram_lookup import EngramLookup


def body(f: Body, op: EngramLookup, rows: Term, table: Term, scale: Term | None = None) -> Term:
    """Rows [T, Q, dh] times their scales; an fp8 table is decoded as a whole: runtimes gather no fp8."""
    if scale is None:
        return f.join_last(f.Gather(table, rows).wide)
    values = f.split_last(f.Gather(table.wide, rows), 32)
    factors = f.Gather(scale.wide, rows)
    return f.join_last(f.join_last(values * f.Unsqueeze(factors, [-1])))
