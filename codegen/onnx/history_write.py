"""Write of compressed ids into the Engram history of their sequence."""

from __future__ import annotations

from v41c.codegen.onnx.body import Body, Term
from v41c.codegen.onnx.rows import newest_rows, store
from v41c.ir.ops.history_write import HistoryWrite


def body(f: Body, op: HistoryWrite, history: Term, ids: Term, positions: Term, slots: Term) -> Term:
    """The newest ids of each run."""
    length = int(history.shape[1])
    kept = newest_rows(f, slots.wide, positions.wide, length)
    return store(f, history, (slots.wide, positions.wide % length), ids, kept)
