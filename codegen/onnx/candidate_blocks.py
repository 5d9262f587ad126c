"""The candidate pool of later indexers."""

from __future__ import annotations

import math

from v41c.codegen.onnx.body import Body, Term
from v41c.codegen.onnx.rows import best_ascending, index_scores
from v41c.ir.ops.candidate_blocks import CandidateBlocks


def body(f: Body, op: CandidateBlocks, q: Term, weights: Term, keys: Term, positions: Term, slots: Term) -> Term:
    """The best blocks by their best row; the newest one's score is infinite."""
    scores, visible = index_scores(f, q, weights, op.scale, keys, positions, slots, op.ratio)
    padding = (-f.Shape(scores, start=1)) % op.block
    padded = f.Pad(scores, f.Concat([0, 0, 0], padding, axis=0), -math.inf)
    best = f.ReduceMax(f.Reshape(padded, [0, -1, op.block]), [-1], keepdims=0)
    newest = f.column((f.Max(visible, 1) - 1) // op.block)
    counts = f.Equal(f.arange(f.Shape(best, start=1)), newest) & f.column(visible > 0)
    return best_ascending(f, f.Where(counts, math.inf, best), op.blocks)
