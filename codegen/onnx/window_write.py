"""Write of window keys into the ring of their sequence."""

from __future__ import annotations

from v41c.codegen.onnx.body import Body, Term
from v41c.codegen.onnx.formats import write_rows
from v41c.codegen.onnx.rows import newest_rows, store
from v41c.ir.ops.window_write import WindowWrite


def body(f: Body, op: WindowWrite, window: Term, kv: Term, positions: Term, slots: Term) -> Term:
    """The newest keys of each run."""
    length = int(window.shape[1])
    position, slot = positions.wide, slots.wide
    rows = write_rows(f, kv, "fp8_e8m0_32", window)
    return store(f, window, (slot, position % length), rows, newest_rows(f, slot, position, length))
