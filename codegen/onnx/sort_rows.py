"""The order in which the rows of a table are read."""

from __future__ import annotations

from onnx import TensorProto

from v41c.codegen.onnx.body import Body, Term
from v41c.ir.ops.sort_rows import SortRows


def body(f: Body, op: SortRows, rows: Term, table: Term | None = None, scale: Term | None = None) -> tuple[Term, Term]:
    """Equal rows keep their order, as `TopK` takes the lower index first. Nothing is asked for ahead."""
    for operand in (table, scale):
        if operand is not None:
            operand.to(TensorProto.FLOAT)  # an input that no node reads could be no fp8 under ONNX Runtime
    flat = f.Reshape(rows, [-1])
    ordered, places = f.many("TopK", 2, flat, f.Shape(flat), axis=0, largest=0, sorted=1)
    return f.Reshape(ordered, f.Shape(rows)), f.Reshape(places, f.Shape(rows))
