"""Where each token's run starts in the step."""

from __future__ import annotations

from v41c.codegen.onnx.body import Body, Term
from v41c.ir.ops.run_starts import RunStarts


def body(f: Body, op: RunStarts, positions: Term, slots: Term) -> Term:
    """The last row up to each token's that does not continue the row before it."""
    position, slot = positions.wide, slots.wide
    rows = f.arange(f.Shape(slot))
    before = f.Max(rows - 1, 0)
    # the first row is compared with itself, whose position is not the next
    continues = f.Equal(f.Gather(slot, before), slot) & f.Equal(f.Gather(position, before) + 1, position)
    begins = f.Where(continues, 0, rows)
    return f.ReduceMax(f.Where(rows <= f.column(rows), begins, 0), [1], keepdims=0)
