"""Attention of a token: heads are the rows of its products, keys of the window and selected rows their columns.

A key is dequantised once a block to the type of the queries, which represents e4m3 times a power of two and e2m1 times
e4m3 exactly, and serves both products. Scores, sums and the running maximum are f32. What a masked entry's memory holds
never enters: it is not loaded.
"""

from __future__ import annotations

import triton.language as tl

from v41c.codegen.cuda.language import jit
from v41c.codegen.cuda.packed_rows import read_fp4_rows, read_fp8_rows, read_plain_rows


@jit
def rotate(
    values: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    INVERSE: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
) -> tl.tensor:
    """[R, B] with the adjacent pairs of elements WIDTH − 2 · HALF … WIDTH − 1 rotated by a token's tables [HALF].

    f32, rounded to the type of the values. WIDTH is even.
    """
    ROWS: tl.constexpr = values.shape[0]
    PAIRS: tl.constexpr = values.shape[1] // 2
    pair = tl.arange(0, PAIRS) - (WIDTH // 2 - HALF)
    rotated = (pair >= 0) & (pair < HALF)
    c = tl.load(cos + pair, mask=rotated, other=1.0)[None, :]
    s = tl.load(sin + pair, mask=rotated, other=0.0)[None, :]
    if INVERSE:
        s = -s
    left, right = tl.split(tl.reshape(values, (ROWS, PAIRS, 2)))
    a, b = left.to(tl.float32), right.to(tl.float32)
    first = tl.where(rotated[None, :], a * c - b * s, a)
    second = tl.where(rotated[None, :], a * s + b * c, b)
    return tl.reshape(tl.join(first, second), (ROWS, 2 * PAIRS)).to(values.dtype)


@jit
def _absorb(
    q: tl.tensor,
    keys: tl.tensor,
    seen: tl.tensor,
    maximum: tl.tensor,
    total: tl.tensor,
    sums: tl.tensor,
    SCALE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Maximum, total and sums of values with a tile of entries more."""
    # one head, in f32: the vector units, which multiply tiles of f32 only out of more registers than there are
    ALONE: tl.constexpr = q.shape[0] == 1
    scores = tl.sum(q * keys, axis=1)[None, :] * SCALE if ALONE else tl.dot(q, tl.trans(keys)) * SCALE
    scores = tl.where(seen[None, :], scores, float("-inf"))
    highest = tl.maximum(maximum, tl.max(scores, axis=1))
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    decay = tl.exp(maximum - shift)
    weights = tl.exp(scores - shift[:, None])
    total = total * decay + tl.sum(weights, axis=1)
    if ALONE:
        sums = sums * decay[:, None] + tl.sum(tl.trans(weights) * keys, axis=0)[None, :]
    else:
        sums = tl.dot(weights.to(q.dtype), keys, sums * decay[:, None])
    return highest, total, sums


@jit
def _tile_keys(
    kv: tl.tensor,
    window: tl.tensor,
    compressed: tl.tensor,
    row: tl.tensor,
    own: tl.tensor,
    key: tl.tensor,
    old: tl.tensor,
    chosen: tl.tensor,
    t: tl.tensor,
    slot: tl.tensor,
    C: tl.tensor,
    WIDTH: tl.constexpr,
    BD: tl.constexpr,
    LENGTH: tl.constexpr,
    PACKED: tl.constexpr,
    ROWS: tl.constexpr,
    PICKED: tl.constexpr,
    STRIDE: tl.constexpr,
) -> tl.tensor:
    """[BE, BD] of entries that are `own` rows of the step, `old` positions of the ring, or rows chosen; else zeros."""
    keys = read_plain_rows(kv, row.to(tl.int64), own, WIDTH, WIDTH, BD)
    if tl.max(old.to(tl.int32), axis=0) > 0:
        place = slot.to(tl.int64) * LENGTH + key % LENGTH
        if PACKED:
            ring = read_fp8_rows(window, place, old, WIDTH, BD).to(keys.dtype)
        else:
            ring = read_plain_rows(window, place, old, WIDTH, WIDTH, BD)
        keys = tl.where(old[:, None], ring, keys)
    if compressed is not None:
        keys = _with_chosen(keys, compressed, chosen, t, slot, C, WIDTH, BD, ROWS, PICKED, STRIDE)
    return keys


@jit
def _with_chosen(
    keys: tl.tensor,
    compressed: tl.tensor,
    chosen: tl.tensor,
    t: tl.tensor,
    slot: tl.tensor,
    C: tl.tensor,
    WIDTH: tl.constexpr,
    BD: tl.constexpr,
    ROWS: tl.constexpr,
    PICKED: tl.constexpr,
    STRIDE: tl.constexpr,
) -> tl.tensor:
    """The keys with compressed rows where some are chosen."""
    if tl.max(chosen, axis=0) >= 0:
        place = slot.to(tl.int64) * C + chosen
        if ROWS == "packed":
            rows = read_fp4_rows(compressed, place, chosen >= 0, WIDTH, 16, False, BD).to(keys.dtype)
        elif ROWS == "plain":
            rows = read_plain_rows(compressed, place, chosen >= 0, WIDTH, WIDTH, BD).to(keys.dtype)
        else:
            place = t.to(tl.int64) * PICKED + chosen
            rows = read_plain_rows(compressed, place, chosen >= 0, WIDTH, STRIDE, BD).to(keys.dtype)
        keys = tl.where((chosen >= 0)[:, None], rows, keys)
    return keys


@jit
def _run_length(starts: tl.tensor, start: tl.tensor, T: tl.tensor, TOKENS: tl.constexpr) -> tl.tensor:
    """Tokens of the run that begins at `start`."""
    row = tl.arange(0, TOKENS)
    begins = tl.load(starts + row, mask=row < T, other=-1)
    return tl.sum((begins == start).to(tl.int32), axis=0)


@jit
def _picked(selection: tl.tensor, ROWS: tl.constexpr, PICKED: tl.constexpr, BP: tl.constexpr) -> tl.tensor:
    """One more than the place of the last entry that selects a row; of gathered rows, which have no gaps, how many."""
    place = tl.arange(0, BP)
    chosen = tl.load(selection + place, mask=place < PICKED, other=-1)
    if ROWS == "gathered":
        count = tl.sum((chosen >= 0).to(tl.int32), axis=0)
    else:
        count = tl.max(tl.where(chosen >= 0, place + 1, 0), axis=0)
    return count


@jit
def attend_entries(
    q: tl.tensor,
    kv: tl.tensor,
    window: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    starts: tl.tensor,
    first: tl.tensor,
    compressed: tl.tensor,
    selection: tl.tensor,
    t: tl.tensor,
    split: tl.tensor,
    T: tl.tensor,
    C: tl.tensor,
    SCALE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WIDTH: tl.constexpr,
    BD: tl.constexpr,
    LENGTH: tl.constexpr,
    PICKED: tl.constexpr,
    BP: tl.constexpr,
    BE: tl.constexpr,
    SPLITS: tl.constexpr,
    TOKENS: tl.constexpr,
    PACKED: tl.constexpr,
    ROWS: tl.constexpr,
    STRIDE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Maximum [BH], total [BH] and sums [BH, BD], f32, of one split of the entries of token t for queries [BH, BD].

    Entries in order: the window by position, not causal the rows of the run, selected rows. A split takes consecutive
    tiles of BE entries, as many as its share of those that this token has.
    """
    position = tl.load(positions + t)
    slot = tl.load(slots + t)
    start = tl.load(starts + t)
    begin = tl.load(positions + start)
    newest = position if CAUSAL else begin - 1
    lowest = tl.maximum(tl.maximum(tl.load(first + t), newest - LENGTH + 1), 0)
    window_end = tl.maximum(newest - lowest + 1, 0)
    run_end = window_end
    if not CAUSAL:
        run_end += _run_length(starts, start, T, TOKENS)
    end = run_end
    if selection is not None:
        end += _picked(selection + t.to(tl.int64) * PICKED, ROWS, PICKED, BP)
    tiles = (end + BE - 1) // BE
    span = (tiles + SPLITS - 1) // SPLITS
    maximum = tl.full((q.shape[0],), float("-inf"), tl.float32)
    total = tl.zeros((q.shape[0],), tl.float32)
    sums = tl.zeros((q.shape[0], BD), tl.float32)
    for tile in range(split * span, tl.minimum((split + 1) * span, tiles)):
        entry = tile * BE + tl.arange(0, BE)
        key = lowest + entry
        old = (entry < window_end) & (key < begin)
        own = (entry < run_end) & ((key >= begin) | (entry >= window_end))
        row = tl.where(entry < window_end, start + key - begin, start + entry - window_end)
        place = entry - run_end
        picked = (place >= 0) & (entry < end)
        chosen = tl.where(picked, place, -1)
        if (selection is not None) & (ROWS != "gathered"):
            chosen = tl.load(selection + t.to(tl.int64) * PICKED + place, mask=picked, other=-1)
        keys = _tile_keys(
            *(kv, window, compressed, row, own, key, old, chosen, t, slot, C),
            *(WIDTH, BD, LENGTH, PACKED, ROWS, PICKED, STRIDE),
        )
        seen = (entry < run_end) | (chosen >= 0)
        maximum, total, sums = _absorb(q, keys, seen, maximum, total, sums, SCALE)
    return maximum, total, sums


@jit
def finish_heads(
    maximum: tl.tensor,
    total: tl.tensor,
    sums: tl.tensor,
    sink: tl.tensor,
    out: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    head: tl.tensor,
    H: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
) -> None:
    """Let the sinks join, divide, round, rotate back if there are tables, and store rows `head` of out [H, WIDTH]."""
    joined = tl.load(sink + head, mask=head < H, other=0.0)
    # a token without visible entries has sums of zero
    total = tl.where(maximum == float("-inf"), 1.0, total + tl.exp(joined - maximum))
    values = tl.math.div_rn(sums, total[:, None] + tl.zeros_like(sums))
    values = values.to(out.dtype.element_ty)
    if cos is not None:
        values = rotate(values, cos, sin, True, WIDTH, HALF)
    k = tl.arange(0, sums.shape[1])[None, :]
    tl.store(out + head[:, None] * WIDTH + k, values, mask=(head[:, None] < H) & (k < WIDTH))
