"""Selection of compressed rows by the indexer."""

from __future__ import annotations

import math

from v41c.codegen.onnx.body import Body, Term
from v41c.codegen.onnx.rows import best_ascending, index_scores
from v41c.ir.ops.index_topk import IndexTopk


def body(
    f: Body,
    op: IndexTopk,
    q: Term,
    weights: Term,
    keys: Term,
    positions: Term,
    slots: Term,
    pool: Term | None = None,
) -> Term:
    """The best visible rows, of the candidate blocks if there is a pool."""
    scores, _ = index_scores(f, q, weights, op.scale, keys, positions, slots, op.ratio)
    if pool is not None:
        blocks = f.arange(f.Shape(scores, start=1)) // op.block
        # what fills the end of a pool marks a place beyond every block
        beyond = f.Shape(scores, start=1)
        listed = f.Where(pool.wide < 0, beyond, pool.wide)
        marks = f.full(0.0, f.Shape(scores, end=1), beyond + 1)
        marks = f.ScatterElements(marks, listed, f.full(1.0, f.Shape(listed)), axis=1)
        scores = f.Where(f.Gather(marks, blocks, axis=1) > 0.0, scores, -math.inf)
    return best_ascending(f, scores, op.topk)
