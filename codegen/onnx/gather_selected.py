"""Selected rows of a compressed cache, dequantised."""

from __future__ import annotations

from v41c.codegen.onnx.body import Body, Term
from v41c.codegen.onnx.formats import read_rows
from v41c.ir.ops.gather_selected import GatherSelected


def body(f: Body, op: GatherSelected, compressed: Term, selection: Term, slots: Term) -> Term:
    """Places in order of what is selected, then the others, whose rows are zeros."""
    chosen, count = selection.wide, f.Shape(selection, start=1)
    place = f.arange(count)
    _, order = f.many("TopK", 2, f.Where(chosen >= 0, place, place + count), count, axis=1, largest=0, sorted=1)
    chosen = f.GatherElements(chosen, order, axis=1)
    slot = f.Expand(f.column(slots.wide), f.Shape(chosen))
    picked = f.GatherND(compressed, f.stack_last(slot, f.Max(chosen, 0)))
    rows = read_rows(f, picked, "fp4_e4m3_16", op.width)
    kept = f.Where(f.Unsqueeze(chosen >= 0, [-1]), rows, 0.0)
    return f.Pad(kept, [0, 0, 0, 0, 0, op.stride - op.width], 0.0)
