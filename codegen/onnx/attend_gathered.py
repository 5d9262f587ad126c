"""Attention with its rotations over selected rows that were gathered before."""

from __future__ import annotations

from dataclasses import replace

from v41c.codegen.onnx import attention, rope, window_write
from v41c.codegen.onnx.body import Body, Term
from v41c.ir.ops.attend_gathered import AttendGathered
from v41c.ir.ops.attention import Attention
from v41c.ir.ops.rope import Rope
from v41c.ir.ops.window_write import WindowWrite


def body(
    f: Body,
    op: AttendGathered,
    q: Term,
    kv: Term,
    sink: Term,
    window: Term,
    positions: Term,
    slots: Term,
    starts: Term,
    first: Term,
    cos: Term,
    sin: Term,
    rows: Term,
    selection: Term,
) -> tuple[Term, Term]:
    """Attention to caches whose slot is the token: its window, and its rows in the order of the selection."""
    tokens, width = f.arange(f.Shape(slots)), int(q.shape[2])
    counts = f.ReduceSum((selection.wide >= 0).to(tokens.dtype), [1], keepdims=1)
    place = f.arange(f.Shape(selection, start=1))
    places = f.Where(f.Expand(place, f.Shape(selection)) < counts, place, -1)
    rotated = replace(rope.body(f, Rope(inverse=False), q, cos, sin), type=q.type)
    ring = replace(f.Gather(window, slots.wide), type=window.type)
    plain = f.Slice(rows, [0], [width], [2])
    step = (positions, tokens, starts, first)
    attended = attention.body(f, Attention(op.scale, True), rotated, kv, sink, ring, *step, plain, places)
    turned = replace(attended.to(q.dtype), type=q.type)
    written = window_write.body(f, WindowWrite(), window, kv, positions, slots)
    return written, rope.body(f, Rope(inverse=True), turned, cos, sin)
