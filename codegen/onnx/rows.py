"""What operations on states and selections share: indexed stores, and the best of many scores."""

from __future__ import annotations

import math

from v41c.codegen.onnx.body import Body, Term
from v41c.codegen.onnx.formats import read_rows


def store(f: Body, state: Term, places: tuple[Term, ...], rows: Term, kept: Term) -> Term:
    """`state` with `state[places[0][t], places[1][t], …] = rows[t]` for the rows t that are kept."""
    chosen = [f.Compress(part, kept, axis=0) for part in (f.stack_last(*places), rows)]
    return f.ScatterND(state, *chosen)


def newest_rows(f: Body, slots: Term, positions: Term, length: int) -> Term:
    """Rows bool [T] that no later token of their run overwrites in a ring of `length` positions."""
    count = f.Shape(slots)
    ahead = f.arange(count) + length
    there = f.Min(ahead, count - 1)
    other_slot = f.Not(f.Equal(f.Gather(slots, there), slots))
    other_run = f.Not(f.Equal(f.Gather(positions, there), positions + length))
    return (ahead >= count) | other_slot | other_run


def index_scores(
    f: Body, q: Term, weights: Term, scale: float, keys: Term, positions: Term, slots: Term, ratio: int
) -> tuple[Term, Term]:
    """Scores f32 [T, C] of every cache row, −inf where it is not visible, and the count i64 [T] of visible rows."""
    width = int(q.shape[2])
    columns = f.Transpose(read_rows(f, keys, "fp4_e8m0_32", width), perm=[0, 2, 1])
    factors = (weights.wide * scale).to(weights.dtype).wide

    def score(query: Term, factor: Term, slot: Term) -> tuple[Term, ...]:
        products = f.Relu(f.MatMul(query, f.Gather(columns, slot)))
        return (f.MatMul(factor, products),)

    (scores,) = f.scan(score, [], [q.wide, factors, slots.wide])
    visible = (positions.wide + 1) // ratio
    seen = f.arange(f.Shape(columns, start=2)) < f.column(visible)
    return f.Where(seen, scores, -math.inf), visible


def best_ascending(f: Body, scores: Term, count: int) -> Term:
    """Indices i64 [T, count] of the best finite scores, ties to the lower index, ascending, −1 at the end."""
    padded = f.Pad(scores, [0, 0, 0, count], -math.inf)
    values, order = f.many("TopK", 2, padded, [count], axis=1, largest=1, sorted=1)
    beyond = 2**31
    kept, _ = f.many("TopK", 2, f.Where(values > -math.inf, order, beyond), [count], axis=1, largest=0, sorted=1)
    return f.Where(kept < beyond, kept, -1)
