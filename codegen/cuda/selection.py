"""Choice of the best of scored ids in memory, ties to the lower id, ids kept in ascending order.

Lists stand in segments: segment s holds `counts[s]` entries from s · STRIDE on, ids ascending within and over segments.
The K-th best key is found digit by digit from the highest, by counting; everything above it is kept, and of its equals
the first ones. Counts are integers, so the choice depends neither on time nor on how a list was cut.
"""

from __future__ import annotations

import triton.language as tl

from v41c.codegen.cuda.language import jit

#: below every key
LOWEST = tl.constexpr(-(1 << 31))


@jit
def order_keys(scores: tl.tensor) -> tl.tensor:
    """i32 that compare as f32 scores do, −0 equal to +0."""
    bits = scores.to(tl.int32, bitcast=True)
    bits = tl.where((bits & 0x7FFFFFFF) == 0, 0, bits)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit
def _entries(
    counts: tl.tensor, first: tl.tensor, SEGMENTS: tl.constexpr, LENGTH: tl.constexpr, CHUNK: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Segment and place of CHUNK entries in order, and whether they exist."""
    entry = first + tl.arange(0, CHUNK)
    segment, place = entry // LENGTH, entry % LENGTH
    count = tl.load(counts + segment, mask=segment < SEGMENTS, other=0, cache_modifier=".cg")
    return segment, place, place < count


@jit
def kth_best(
    keys: tl.tensor,
    counts: tl.tensor,
    K: tl.constexpr,
    SEGMENTS: tl.constexpr,
    LENGTH: tl.constexpr,
    STRIDE: tl.constexpr,
    CHUNK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The K-th highest key of at least K, and how many of those equal to it are among the K best.

    Segments have at most LENGTH entries, which divides CHUNK or is divided by it.
    """
    digits = tl.arange(0, 256)
    prefix = tl.full((), 0, tl.int32)
    wanted = tl.full((), K, tl.int32)
    for step in range(4):
        shift = 24 - 8 * step
        bins = tl.zeros((256,), tl.int32)
        for first in range(0, SEGMENTS * LENGTH, CHUNK):
            segment, place, exists = _entries(counts, first, SEGMENTS, LENGTH, CHUNK)
            key = tl.load(keys + segment * STRIDE + place, mask=exists, other=0, cache_modifier=".cg")
            # unsigned order of the digits
            upper = ((key ^ LOWEST).to(tl.uint32, bitcast=True) >> shift).to(tl.int32, bitcast=True)
            above = (upper.to(tl.uint32, bitcast=True) >> 8).to(tl.int32, bitcast=True)
            bins += tl.histogram(upper & 255, 256, mask=exists & ((above == prefix) | (step == 0)))
        reached = tl.cumsum(bins, axis=0, reverse=True)
        digit = tl.max(tl.where(reached >= wanted, digits, 0), axis=0)
        wanted -= tl.sum(tl.where(digits > digit, bins, 0), axis=0)
        prefix = (prefix << 8) | digit
    return prefix ^ LOWEST, wanted


@jit
def keep_best(
    keys: tl.tensor,
    ids: tl.tensor,
    counts: tl.tensor,
    out_keys: tl.tensor,
    out_ids: tl.tensor,
    limit: tl.tensor,
    equals: tl.tensor,
    SEGMENTS: tl.constexpr,
    LENGTH: tl.constexpr,
    STRIDE: tl.constexpr,
    CHUNK: tl.constexpr,
) -> tl.tensor:
    """Write the entries above `limit`, and the first `equals` that equal it; how many. May write over its input."""
    kept = tl.full((), 0, tl.int32)
    met = tl.full((), 0, tl.int32)
    for first in range(0, SEGMENTS * LENGTH, CHUNK):
        segment, place, exists = _entries(counts, first, SEGMENTS, LENGTH, CHUNK)
        source = segment * STRIDE + place
        key = tl.load(keys + source, mask=exists, other=0, cache_modifier=".cg")
        number = tl.load(ids + source, mask=exists, other=0, cache_modifier=".cg")
        # entries move to the front: all of a chunk are read before one is written
        tl.debug_barrier()
        equal = (exists & (key == limit)).to(tl.int32)
        early = (met + tl.cumsum(equal, axis=0)) <= equals
        chosen = exists & ((key > limit) | ((key == limit) & early))
        flags = chosen.to(tl.int32)
        target = kept + tl.cumsum(flags, axis=0) - 1
        if out_keys is not None:
            tl.store(out_keys + target, key, mask=chosen)
        tl.store(out_ids + target, number, mask=chosen)
        met += tl.sum(equal, axis=0)
        kept += tl.sum(flags, axis=0)
    return kept


@jit
def best_of(
    keys: tl.tensor,
    ids: tl.tensor,
    counts: tl.tensor,
    total: tl.tensor,
    out_keys: tl.tensor,
    out_ids: tl.tensor,
    K: tl.constexpr,
    SEGMENTS: tl.constexpr,
    LENGTH: tl.constexpr,
    STRIDE: tl.constexpr,
    CHUNK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Write the K best of `total` entries; how many these are, and a key that further ones must exceed."""
    limit = tl.full((), LOWEST, tl.int32)
    equals = tl.full((), 0, tl.int32)
    if total > K:
        limit, equals = kth_best(keys, counts, K, SEGMENTS, LENGTH, STRIDE, CHUNK)
    kept = keep_best(keys, ids, counts, out_keys, out_ids, limit, equals, SEGMENTS, LENGTH, STRIDE, CHUNK)
    return kept, limit
