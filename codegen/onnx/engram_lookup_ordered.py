"""Rows of an Engram table in its order, put where they belong."""

from __future__ import annotations

from v41c.codegen.onnx import engram_lookup
from v41c.codegen.onnx.body import Body, Term
from v41c.ir.ops.engram_lookup import EngramLookup
from v41c.ir.ops.engram_lookup_ordered import EngramLookupOrdered


def body(f: Body, op: EngramLookupOrdered, rows: Term, places: Term, table: Term, scale: Term | None = None) -> Term:
    """The lookup, scattered over pairs of a token and a row."""
    values = engram_lookup.body(f, EngramLookup(op.out), rows, table, scale)
    pairs = f.Reshape(values, [-1, int(table.shape[1])])
    moved = f.ScatterND(pairs, f.column(f.Reshape(places.wide, [-1])), pairs)
    return f.Reshape(moved, f.Shape(values))
