"""The best rows or blocks of rows under the indexer's scores: one launch, whose blocks score a part of a cache each.

A part keeps its best in a list that is cut back whenever it is full, so that memory is bounded by tokens, parts and
places, and not by the context. The last part of a group to end merges the group's lists, and the last group of a token
the groups'. Selection is exact, so neither cuts nor groups show in the result.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton.language as tl

from v41c.codegen.cuda.frame import Arguments, Frame
from v41c.codegen.cuda.index_scores import read_keys, read_queries, read_weights, score_rows, score_rows_exactly
from v41c.codegen.cuda.kernel import CudaKernel
from v41c.codegen.cuda.language import jit
from v41c.codegen.cuda.rows import power_of_two
from v41c.codegen.cuda.selection import LOWEST, best_of, order_keys
from v41c.ir.types import DType
from v41c.targets.cuda import CudaTarget

#: lists merged by one block
_GROUP = 16


@dataclass(frozen=True)
class _Shape:
    """Tokens of a block, rows of a tile, parts of a cache, and threads in warps."""

    tokens: int
    rows: int
    parts: int
    warps: int


def add_choice(frame: Frame, target: CudaTarget, keep: int, unit: int, by_pool: bool) -> CudaKernel:
    """The kernel of an operation with operands q, weights, keys, positions, slots and, `by_pool`, pool.

    It keeps the `keep` best units: rows, or blocks of `unit` rows where the operation chooses blocks.
    """
    attributes = frame.op.attributes()
    q, keys = frame.type_of("q"), frame.type_of("keys")
    heads, width = int(q.shape[1]), int(q.shape[2])
    block = int(attributes["block"]) if by_pool or unit > 1 else 1
    padded = power_of_two(block)
    pool = int(frame.type_of("pool").shape[1]) if by_pool else 0
    count = pool if by_pool else -(-frame.bound(keys.shape[1]) // block)
    tokens = frame.bound(q.shape[0])
    shape = _shape(target, tokens, -(-count * padded // 128), keys.dtype == DType.F32, by_pool)
    rows = max(shape.rows, padded)
    # entries that a tile adds at most, and those of a list: more room than places, or it would be cut at every tile
    added = rows if by_pool or unit == 1 else rows // padded
    capacity = power_of_two(keep + 4 * added) * (1 if tokens > 16 else 4)
    groups = -(-shape.parts // _GROUP)
    length = power_of_two(keep)
    packing = "plain" if keys.dtype == DType.F32 else "words" if width % 128 == 0 else "bytes"
    # entries of a list that are looked at together: 16 a thread were spilled by a few bytes
    chunk = 256 * shape.warps
    operand = frame.operand("keys")
    lists = frame.bound(q.shape[0]) * shape.parts
    merged = frame.bound(q.shape[0]) * groups
    inputs: Arguments = {name: frame.operand(name) for name in ("q", "weights", "positions", "slots")}
    frame.launch(
        index_part,
        inputs
        | {"keys": operand.cast("i32") if operand is not None and packing == "words" else operand}
        | {"pool": frame.operand("pool") if by_pool else None, "out": frame.result(0)}
        | {"list_keys": frame.workspace(lists * capacity, "i32"), "list_ids": frame.workspace(lists * capacity, "i32")}
        | {"counts": frame.workspace(lists, "i32"), "merged_counts": frame.workspace(merged, "i32")}
        | {"merged_keys": frame.workspace(merged * length, "i32")}
        | {"merged_ids": frame.workspace(merged * length, "i32")}
        | {"ended": frame.counters(merged + tokens)}
        | {"T": frame.extent(q.shape[0]), "C": frame.extent(keys.shape[1]), "RATIO": int(attributes["ratio"])}
        | {"K": keep, "SCALE": float(attributes["scale"]), "BLOCK": block, "PAD": padded, "POOL": pool}
        | {"BLOCKS": unit > 1, "H": heads, "BH": max(16, power_of_two(heads)), "DI": width}
        | {"BD": max(32, power_of_two(width)), "PACKING": packing, "TOKENS": shape.tokens, "ROWS": rows}
        | {"PARTS": shape.parts, "GROUPS": groups, "GROUP": min(_GROUP, shape.parts), "CAPACITY": capacity}
        | {"LENGTH": length, "CHUNK": min(chunk, capacity), "MERGED_CHUNK": chunk},
        (shape.parts, frame.tiles(q.shape[0], shape.tokens)),
        warps=shape.warps,
        stages=3,
    )
    return frame.kernel()


def _shape(target: CudaTarget, tokens: int, tiles: int, exact: bool, by_pool: bool) -> _Shape:
    """Blocks that fill the processor twice over parts and tokens, as far as there are tiles of 128 rows.

    Many tokens of a sequence share the keys of a tile: unpacking a key costs the vector units three times what its
    product with 32 heads costs the tensor cores, so four tokens share it; two where the tensor cores' operands fill
    registers beside the sums. Pools differ from token to token. Plain keys, which stay in registers, are 32 rows of a
    tile for twice the threads.
    """
    together = 4 if target.has_wgmma or target.has_tcgen05 else 2
    shared = together if tokens > 16 and not exact and not by_pool else 1
    blocks = -(-tokens // shared)
    wanted = max(4, 2 * target.multiprocessors // blocks)
    parts = 1 << (max(1, min(wanted, tiles)).bit_length() - 1)
    return _Shape(shared, 32 if exact else 128, parts, 8 if shared > 1 or exact else 4)


@jit
def index_part(
    q: tl.tensor,
    weights: tl.tensor,
    keys: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    pool: tl.tensor,
    out: tl.tensor,
    list_keys: tl.tensor,
    list_ids: tl.tensor,
    counts: tl.tensor,
    merged_keys: tl.tensor,
    merged_ids: tl.tensor,
    merged_counts: tl.tensor,
    ended: tl.tensor,
    T: tl.tensor,
    C: tl.tensor,
    RATIO: tl.constexpr,
    K: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
    PAD: tl.constexpr,
    POOL: tl.constexpr,
    BLOCKS: tl.constexpr,
    H: tl.constexpr,
    BH: tl.constexpr,
    DI: tl.constexpr,
    BD: tl.constexpr,
    PACKING: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    CAPACITY: tl.constexpr,
    LENGTH: tl.constexpr,
    CHUNK: tl.constexpr,
    MERGED_CHUNK: tl.constexpr,
) -> None:
    """A part of the caches of TOKENS tokens, whose entries are told apart by slot."""
    UNITS: tl.constexpr = ROWS // PAD
    part = tl.program_id(0)
    first = tl.program_id(1) * TOKENS
    lane = tl.arange(0, TOKENS)
    token = first + lane
    if PACKING == "plain":
        queries, weight = q + first.to(tl.int64) * (H * DI), weights + first.to(tl.int64) * H
    else:
        queries = read_queries(q, first, T, TOKENS, H, BH, DI, BD)
        weight = read_weights(weights, first, T, SCALE, TOKENS, H, BH)
    position = tl.load(positions + token, mask=token < T, other=-1)
    slot = tl.load(slots + token, mask=token < T, other=-1)
    visible = (position + 1) // RATIO
    count = tl.zeros((TOKENS,), tl.int32)
    floor = tl.full((TOKENS,), LOWEST, tl.int32)
    waiting = (token < T).to(tl.int32)
    while tl.sum(waiting, axis=0) > 0:
        leader = tl.min(tl.where(waiting > 0, lane, TOKENS), axis=0)
        cache = tl.sum(tl.where(lane == leader, slot, 0), axis=0)
        member = (waiting > 0) & (slot == cache)
        seen = tl.where(member, visible, 0)
        most = tl.max(seen, axis=0)
        units, rows_allowed = (most + BLOCK - 1) // BLOCK, most
        if pool is not None:
            units, rows_allowed = POOL, _rows_of_pool(pool + first.to(tl.int64) * POOL, most, BLOCK, POOL)
        scored = (units > K) if BLOCKS else (rows_allowed > K)
        tiles = (units + UNITS - 1) // UNITS
        span = (tiles + PARTS - 1) // PARTS
        tile, end = part * span, tl.minimum((part + 1) * span, tiles)
        if scored == 0:
            for one in range(tile, end):
                count = _add_tile(
                    *(keys, pool, list_keys, list_ids, queries, weight, count, floor, seen, most, one, first, part),
                    *(cache, C, BLOCK, PAD, POOL, BLOCKS, SCALE, H, DI, BD, PACKING, TOKENS, BH, ROWS, PARTS, CAPACITY),
                    False,
                )
            tile = end
        while tile < end:
            # as many tiles as fit whatever their scores: a loop without a cut inside asks for keys ahead of their use
            fitting = (CAPACITY - tl.max(count, axis=0)) // (UNITS if BLOCKS else ROWS)
            stop = tl.minimum(tile + fitting, end)
            for one in range(tile, stop):
                count = _add_tile(
                    *(keys, pool, list_keys, list_ids, queries, weight, count, floor, seen, most, one, first, part),
                    *(cache, C, BLOCK, PAD, POOL, BLOCKS, SCALE, H, DI, BD, PACKING, TOKENS, BH, ROWS, PARTS, CAPACITY),
                    True,
                )
            tile = stop
            if (tile == end) | (tl.max(count, axis=0) > CAPACITY - (UNITS if BLOCKS else ROWS)):
                count, floor = _cut(
                    *(list_keys, list_ids, counts, first, part, count, floor, K, PARTS, CAPACITY, TOKENS, CHUNK)
                )
        waiting = tl.where(slot == cache, 0, waiting)
    tl.store(counts + token.to(tl.int64) * PARTS + part, count, mask=token < T)
    for index in range(0, TOKENS):
        if first + index < T:
            _merge(
                *(list_keys, list_ids, counts, merged_keys, merged_ids, merged_counts, ended, out),
                *(first + index, part, K, PARTS, GROUPS, GROUP, CAPACITY, LENGTH, MERGED_CHUNK),
            )


@jit
def _add_tile(
    keys: tl.tensor,
    pool: tl.tensor,
    list_keys: tl.tensor,
    list_ids: tl.tensor,
    queries: tl.tensor,
    weight: tl.tensor,
    count: tl.tensor,
    floor: tl.tensor,
    seen: tl.tensor,
    most: tl.tensor,
    tile: tl.tensor,
    first: tl.tensor,
    part: tl.tensor,
    cache: tl.tensor,
    C: tl.tensor,
    BLOCK: tl.constexpr,
    PAD: tl.constexpr,
    POOL: tl.constexpr,
    BLOCKS: tl.constexpr,
    SCALE: tl.constexpr,
    H: tl.constexpr,
    DI: tl.constexpr,
    BD: tl.constexpr,
    PACKING: tl.constexpr,
    TOKENS: tl.constexpr,
    BH: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    CAPACITY: tl.constexpr,
    SCORED: tl.constexpr,
) -> tl.tensor:
    """Append a tile's rows or blocks to the lists, those that can still be among the best; the lists' new lengths.

    Not SCORED, all that are visible: there are no more of them than places.
    """
    UNITS: tl.constexpr = ROWS // PAD
    unit = tile * UNITS + tl.arange(0, UNITS)
    number = unit
    if pool is not None:
        number = tl.load(pool + first.to(tl.int64) * POOL + unit, mask=unit < POOL, other=-1)
    inner = tl.arange(0, PAD)
    row = number[:, None] * BLOCK + inner[None, :]
    exists = (number[:, None] >= 0) & (inner[None, :] < BLOCK)
    row = tl.reshape(tl.where(exists, row, most), (ROWS,))
    if SCORED:
        place = cache.to(tl.int64) * C + row
        tile_keys = read_keys(keys, place, row < most, DI, BD, PACKING)
        if PACKING == "plain":
            score = score_rows_exactly(tile_keys, queries, weight, SCALE, H, DI, BD)
        else:
            score = score_rows(tile_keys, queries, weight, TOKENS, BH)
    else:
        score = tl.zeros((ROWS, TOKENS), tl.float32)
    score = tl.where(row[:, None] < seen[None, :], score, float("-inf"))
    if BLOCKS:
        score = tl.max(tl.reshape(score, (UNITS, PAD, TOKENS)), axis=1)
        newest = (seen - 1) // BLOCK
        score = tl.where((seen > 0)[None, :] & (unit[:, None] == newest[None, :]), float("inf"), score)
        row = unit
    # an entry that equals the worst of a full list comes after all of it
    key = order_keys(score)
    better = (score > float("-inf")) & (key > floor[None, :])
    flags = better.to(tl.int32)
    target = count[None, :] + tl.cumsum(flags, axis=0) - 1
    lists = ((first + tl.arange(0, TOKENS)).to(tl.int64) * PARTS + part) * CAPACITY
    tl.store(list_keys + lists[None, :] + target, key, mask=better)
    tl.store(list_ids + lists[None, :] + target, row[:, None] + tl.zeros_like(target), mask=better)
    return count + tl.sum(flags, axis=0)


@jit
def _rows_of_pool(pool: tl.tensor, visible: tl.tensor, BLOCK: tl.constexpr, POOL: tl.constexpr) -> tl.tensor:
    """Visible rows of a token's candidate blocks."""
    total = tl.full((), 0, tl.int32)
    for start in range(0, POOL, 256):
        place = start + tl.arange(0, 256)
        number = tl.load(pool + place, mask=place < POOL, other=-1)
        rows = tl.minimum(tl.maximum(visible - number * BLOCK, 0), BLOCK)
        total += tl.sum(tl.where(number >= 0, rows, 0), axis=0)
    return total


@jit
def _cut(
    list_keys: tl.tensor,
    list_ids: tl.tensor,
    counts: tl.tensor,
    first: tl.tensor,
    part: tl.tensor,
    count: tl.tensor,
    floor: tl.tensor,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    CAPACITY: tl.constexpr,
    TOKENS: tl.constexpr,
    CHUNK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Cut the lists of a part back to K entries; their counts, also in memory, and what further entries must exceed."""
    lane = tl.arange(0, TOKENS)
    for index in range(0, TOKENS):
        total = tl.sum(tl.where(lane == index, count, 0), axis=0)
        if total > K:
            segment = (first + index).to(tl.int64) * PARTS + part
            tl.store(counts + segment, total)
            tl.debug_barrier()
            keys, ids = list_keys + segment * CAPACITY, list_ids + segment * CAPACITY
            kept, limit = best_of(keys, ids, counts + segment, total, keys, ids, K, 1, CAPACITY, CAPACITY, CHUNK)
            count = tl.where(lane == index, kept, count)
            floor = tl.where(lane == index, limit, floor)
            tl.debug_barrier()
    return count, floor


@jit
def _merge(
    list_keys: tl.tensor,
    list_ids: tl.tensor,
    counts: tl.tensor,
    merged_keys: tl.tensor,
    merged_ids: tl.tensor,
    merged_counts: tl.tensor,
    ended: tl.tensor,
    out: tl.tensor,
    token: tl.tensor,
    part: tl.tensor,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    CAPACITY: tl.constexpr,
    LENGTH: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Merge the lists of a group if this part ends it, and the groups' if this group ends the token."""
    group = part // GROUP
    counters = ended + token * (GROUPS + 1)
    target = out + token.to(tl.int64) * K
    tl.debug_barrier()
    if tl.atomic_add(counters + group, 1, sem="acq_rel", scope="gpu") == GROUP - 1:
        tl.store(counters + group, 0)
        tl.debug_barrier()
        segment = token.to(tl.int64) * PARTS + group * GROUP
        keys, ids = list_keys + segment * CAPACITY, list_ids + segment * CAPACITY
        total = tl.sum(tl.load(counts + segment + tl.arange(0, GROUP), cache_modifier=".cg"), axis=0)
        if GROUPS == 1:
            kept, _ = best_of(keys, ids, counts + segment, total, None, target, K, GROUP, LENGTH, CAPACITY, CHUNK)
            _fill(target, kept, K, CHUNK)
        else:
            own = token.to(tl.int64) * GROUPS
            base = own * LENGTH
            to_keys, to_ids = merged_keys + base + group * LENGTH, merged_ids + base + group * LENGTH
            kept, _ = best_of(keys, ids, counts + segment, total, to_keys, to_ids, K, GROUP, LENGTH, CAPACITY, CHUNK)
            tl.store(merged_counts + own + group, kept)
            tl.debug_barrier()
            if tl.atomic_add(counters + GROUPS, 1, sem="acq_rel", scope="gpu") == GROUPS - 1:
                tl.store(counters + GROUPS, 0)
                tl.debug_barrier()
                total = tl.sum(tl.load(merged_counts + own + tl.arange(0, GROUPS), cache_modifier=".cg"), axis=0)
                keys, ids, amounts = merged_keys + base, merged_ids + base, merged_counts + own
                kept, _ = best_of(keys, ids, amounts, total, None, target, K, GROUPS, LENGTH, LENGTH, CHUNK)
                _fill(target, kept, K, CHUNK)


@jit
def _fill(out: tl.tensor, kept: tl.tensor, K: tl.constexpr, CHUNK: tl.constexpr) -> None:
    """−1 behind the entries kept."""
    for start in range(0, K, CHUNK):
        place = start + tl.arange(0, CHUNK)
        tl.store(out + place, -1, mask=(place >= kept) & (place < K))
