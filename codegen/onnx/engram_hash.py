"""Rows of the Engram table for the n-grams that end at a token."""

from __future__ import annotations

import numpy as np

from v41c.codegen.onnx.body import Body, Term
from v41c.ir.ops.engram_hash import EngramHash


def body(f: Body, op: EngramHash, ids: Term, history: Term, positions: Term, slots: Term, starts: Term) -> Term:
    """In i64; products wrap as they do everywhere."""
    count = len(op.multipliers) - 1
    length = int(history.shape[1])
    primes = np.array(op.primes, np.int64).reshape(count, -1)
    rows = f.arange(f.Shape(ids))
    cut: Term | None = None
    acc: Term | None = None
    parts = []
    for back, multiplier in enumerate(op.multipliers):
        row, position = rows - back, positions.wide - back
        old = f.GatherND(history, f.stack_last(slots.wide, position % length)).wide
        token = f.Where(row >= starts.wide, f.Gather(ids, f.Max(row, 0)).wide, old)
        absent = (position < 0) | (token < 0)
        cut = absent if cut is None else cut | absent
        term = f.Where(cut, op.pad, token) * multiplier
        acc = term if acc is None else f.BitwiseXor(acc, term)
        if back:
            parts.append(f.column(acc) % primes[back - 1])
    return f.Concat(*parts, axis=1) + np.array(op.offsets, np.int64)
