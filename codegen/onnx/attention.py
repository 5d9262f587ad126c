"""Attention over gathered entries, in blocks with a running maximum: a Scan over the blocks."""

from __future__ import annotations

import math

from v41c.codegen.onnx.body import Body, Term
from v41c.codegen.onnx.formats import read_rows
from v41c.ir.ops.attention import BLOCK, Attention


def body(
    f: Body,
    op: Attention,
    q: Term,
    kv: Term,
    sink: Term,
    window: Term,
    positions: Term,
    slots: Term,
    starts: Term,
    first: Term,
    compressed: Term | None = None,
    selection: Term | None = None,
) -> Term:
    """Entries are gathered, the visible ones moved to the front, and every 64 of them are one step."""
    width = int(q.shape[2])
    ring = f.Reshape(read_rows(f, window, "fp8_e8m0_32", width), [-1, width])
    rows, seen = _window_entries(f, op, ring, int(window.shape[1]), positions.wide, slots.wide, starts.wide, first.wide)
    entries = f.Gather(f.Concat(ring, kv.wide, axis=0), rows)
    if compressed is not None and selection is not None:
        chosen = selection.wide
        slot = f.Expand(f.column(slots.wide), f.Shape(chosen))
        picked = f.GatherND(compressed, f.stack_last(slot, f.Max(chosen, 0)))
        entries = f.Concat(entries, read_rows(f, picked, "fp4_e4m3_16", width), axis=1)
        seen = f.Concat(seen, chosen >= 0, axis=1)
    entries, visible = _visible_first(f, entries, seen)
    return _softmax(f, op, q, entries, visible, sink)


def _window_entries(
    f: Body, op: Attention, ring: Term, length: int, positions: Term, slots: Term, starts: Term, first: Term
) -> tuple[Term, Term]:
    """Row of each window entry in cat(ring, kv), and whether the token sees it: [T, W], or [T, W + T]."""
    position, slot, start = (f.column(x) for x in (positions, slots, starts))
    begin = f.column(f.Gather(positions, starts))
    newest = position if op.causal else begin - 1
    lowest = f.Max(f.column(first), newest - (length - 1), 0)
    key = lowest + f.arange(f.term([length]))
    rings = f.Shape(ring, end=1)
    rows = f.Where(key >= begin, rings + start + key - begin, slot * length + key % length)
    seen = key <= newest
    if not op.causal:
        counts = f.ReduceSum(f.Equal(start, starts).to(starts.dtype), [1], keepdims=1)
        inside = f.arange(f.Shape(starts))
        rows = f.Concat(rows, rings + start + inside, axis=1)
        seen = f.Concat(seen, inside < counts, axis=1)
    return f.Where(seen, rows, 0), seen


def _visible_first(f: Body, entries: Term, seen: Term) -> tuple[Term, Term]:
    """Entries [T, n, HD] with the visible ones first, in order, a whole number of blocks, and which are visible."""
    count = f.Shape(seen, start=1)
    place = f.arange(count)
    _, order = f.many("TopK", 2, f.Where(seen, place, place + count), count, axis=1, largest=0, sorted=1)
    order = f.Pad(order, f.Concat([0, 0, 0], (-count) % BLOCK, axis=0), 0)
    visible = f.arange(f.Shape(order, start=1)) < f.ReduceSum(seen.to(count.dtype), [1], keepdims=1)
    moved = f.GatherND(entries, f.Unsqueeze(order, [-1]), batch_dims=1)
    # rows that were never written may hold NaN
    return f.Where(f.Unsqueeze(visible, [-1]), moved, 0.0), visible


def _softmax(f: Body, op: Attention, q: Term, entries: Term, visible: Term, sink: Term) -> Term:
    _, heads, width = q.shape
    scores = f.MatMul(q.wide, f.Transpose(entries, perm=[0, 2, 1])) * op.scale
    scores = f.Where(f.Unsqueeze(visible, [1]), scores, -math.inf)

    def step(maximum: Term, total: Term, acc: Term, block: Term, values: Term) -> tuple[Term, ...]:
        new = f.Max(maximum, f.ReduceMax(block, [-1], keepdims=1))
        shift = _finite(f, new)
        decay, p = f.Exp(maximum - shift), f.Exp(block - shift)
        total = total * decay + f.ReduceSum(p, [-1], keepdims=1)
        return new, total, acc * decay + f.MatMul(p.to(q.dtype).wide, values)

    tokens = f.Shape(q, end=1)
    states = [
        f.full(-math.inf, tokens, [int(heads), 1]),
        f.full(0.0, tokens, [int(heads), 1]),
        f.full(0.0, tokens, [int(heads), int(width)]),
    ]
    blocks = f.Transpose(f.Reshape(scores, [0, 0, -1, BLOCK]), perm=[2, 0, 1, 3])
    values = f.Transpose(f.Reshape(entries, [0, -1, BLOCK, int(width)]), perm=[1, 0, 2, 3])
    maximum, total, acc = f.scan(step, states, [blocks, values])
    total = total + f.Exp(f.Reshape(sink, [1, -1, 1]) - _finite(f, maximum))
    return f.Where(f.Equal(maximum, -math.inf), 0.0, acc / total)


def _finite(f: Body, maximum: Term) -> Term:
    """The maximum of entries, 0 when there are none."""
    return f.Where(f.Equal(maximum, -math.inf), 0.0, maximum)
