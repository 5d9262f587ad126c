"""Launches of attention: one over tokens, groups of heads and splits of the entries; with splits, one that joins them.

With few tokens the entries of a token are split over blocks, or a step would keep a few multiprocessors busy. A second
launch joins the splits, a block per head, in the order of the entries, and writes the ring, which every block of the
first has read by then.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton.language as tl

from v41c.codegen.cuda.attention_core import attend_entries, finish_heads, rotate
from v41c.codegen.cuda.frame import Buffer, Frame
from v41c.codegen.cuda.kernel import Constant
from v41c.codegen.cuda.language import jit
from v41c.codegen.cuda.packed_rows import read_plain_rows, write_row
from v41c.codegen.cuda.rings import is_newest
from v41c.codegen.cuda.rows import power_of_two
from v41c.codegen.cuda.window_write import add_ring_write
from v41c.ir.types import DType
from v41c.targets.cuda import CudaTarget


@dataclass(frozen=True)
class _Shape:
    """Heads and entries of a tile, splits of a token's entries, and threads in warps."""

    heads: int
    entries: int
    splits: int
    warps: int


def add_attention(frame: Frame, target: CudaTarget, *, causal: bool, writes: bool) -> None:
    """Launch attention over the operands that `attention` names, between rotations if there are tables.

    `writes`: the step's keys go to the ring after all have read it. The result without the states is the attention's.
    """
    q, window = frame.type_of("q"), frame.type_of("window")
    tokens, heads, width = q.shape[0], int(q.shape[1]), int(q.shape[2])
    named = {declared.name for declared, kind in zip(frame.op.operands(), frame.operands, strict=True) if kind}
    selected = "selection" in named
    picked = int(frame.type_of("selection").shape[1]) if selected else 0
    source = "rows" if "rows" in named else "compressed"
    rows = frame.type_of(source) if selected else None
    half = int(frame.type_of("cos").shape[1]) if "cos" in named else 0
    exact = q.dtype == DType.F32
    shape = _shape(target, frame.bound(tokens), heads, int(window.shape[1]) + picked, exact)
    groups = -(-heads // shape.heads)
    block = max(32, power_of_two(width))
    parts = frame.bound(tokens) * groups * shape.splits
    split = shape.splits > 1
    tables: dict[str, Buffer | Constant] = {
        name: frame.operand(name) if name in named else None for name in ("cos", "sin")
    }
    sums = frame.workspace(parts * shape.heads * block, "fp32") if split else None
    stats = frame.workspace(parts * shape.heads * 2, "fp32") if split else None
    widths = {"H": heads, "BH": shape.heads, "WIDTH": width, "BD": block, "HALF": half, "SPLITS": shape.splits}
    frame.launch(
        attention_part,
        {name: frame.operand(name) for name in ("q", "kv", "sink", "window", "positions", "slots", "starts", "first")}
        | {"compressed": frame.operand(source) if selected else None}
        | {"selection": frame.operand("selection") if selected else None}
        | {"out": frame.result(0), "sums": sums, "stats": stats, "T": frame.extent(tokens)}
        | {"C": frame.extent(rows.shape[1]) if rows is not None else 0}
        | {"SCALE": float(frame.op.attributes()["scale"]), "CAUSAL": causal, "LENGTH": int(window.shape[1])}
        | {"PICKED": picked, "BP": power_of_two(max(picked, 1)), "BE": shape.entries}
        | {"TOKENS": power_of_two(frame.bound(tokens)), "PACKED": window.dtype == DType.U8}
        | {"ROWS": "gathered" if source == "rows" else "packed" if rows and rows.dtype == DType.U8 else "plain"}
        | {"STRIDE": int(rows.shape[2]) if rows is not None else 0}
        | tables
        | widths,
        (frame.tiles(tokens), groups, shape.splits),
        warps=shape.warps,
        # a second buffer for the rows of the step would be empty at nearly every entry of a token
        stages=1,
    )
    if not split:
        if writes:
            add_ring_write(frame)
        return
    frame.launch(
        attention_join,
        {name: frame.operand(name) if writes else None for name in ("kv", "window", "positions", "slots")}
        | {"sink": frame.operand("sink"), "out": frame.result(0), "sums": sums, "stats": stats}
        | {"T": frame.extent(tokens), "LENGTH": int(window.shape[1]), "ROW": int(window.shape[2])}
        | {"FORMAT": "fp8_e8m0_32" if window.dtype == DType.U8 else None}
        | tables
        | widths,
        (frame.tiles(tokens), heads + int(writes)),
    )


def _shape(target: CudaTarget, tokens: int, heads: int, entries: int, exact: bool) -> _Shape:
    """Tiles of 32 entries by as many heads as registers hold.

    Many tokens: 64 heads of 512 sums are 128 registers of each of 256 threads, and with 32 keys 128 KiB of shared
    memory, counting queries that do not fit into registers beside them. Where a block has less, and for few tokens,
    16 heads: queries of 512 values are 128 registers then, sums 32, and a tile of keys 32. With few tokens splits fill
    the processor twice. In f32 a block has one head, whose products are no matrix's.
    """
    if exact:
        return _Shape(1, 16, 1, 4)
    if tokens > 16:
        wide = target.shared_bytes_per_block >= 160 << 10
        return _Shape(min(64, max(16, power_of_two(heads))) if wide else 16, 32, 1, 8)
    blocks = tokens * -(-heads // 16)
    splits = max(1, min(2 * target.multiprocessors // blocks, -(-entries // 32)))
    return _Shape(16, 32, splits, 8)


@jit
def attention_part(
    q: tl.tensor,
    kv: tl.tensor,
    sink: tl.tensor,
    window: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    starts: tl.tensor,
    first: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    compressed: tl.tensor,
    selection: tl.tensor,
    out: tl.tensor,
    sums: tl.tensor,
    stats: tl.tensor,
    T: tl.tensor,
    C: tl.tensor,
    SCALE: tl.constexpr,
    CAUSAL: tl.constexpr,
    H: tl.constexpr,
    BH: tl.constexpr,
    WIDTH: tl.constexpr,
    BD: tl.constexpr,
    HALF: tl.constexpr,
    LENGTH: tl.constexpr,
    PICKED: tl.constexpr,
    BP: tl.constexpr,
    BE: tl.constexpr,
    SPLITS: tl.constexpr,
    TOKENS: tl.constexpr,
    PACKED: tl.constexpr,
    ROWS: tl.constexpr,
    STRIDE: tl.constexpr,
) -> None:
    """BH heads of a token over a split of its entries: the result, or what the join makes it of."""
    t = tl.program_id(0)
    split = tl.program_id(2)
    head = tl.program_id(1) * BH + tl.arange(0, BH)
    queries = read_plain_rows(q, t.to(tl.int64) * H + head, head < H, WIDTH, WIDTH, BD)
    if cos is not None:
        queries = rotate(queries, cos + t.to(tl.int64) * HALF, sin + t.to(tl.int64) * HALF, False, WIDTH, HALF)
        if SPLITS == 1:
            # wgmma takes its first operand from shared memory only if it was loaded, and else from registers, which
            # 64 rows of 512 would fill: the rotated queries pass through the rows that their results will have
            rows = out + (t.to(tl.int64) * H + head[:, None]) * WIDTH + tl.arange(0, BD)[None, :]
            tl.store(rows, queries, mask=(head[:, None] < H) & (tl.arange(0, BD)[None, :] < WIDTH))
            tl.debug_barrier()
            queries = read_plain_rows(out, t.to(tl.int64) * H + head, head < H, WIDTH, WIDTH, BD)
    maximum, total, values = attend_entries(
        *(queries, kv, window, positions, slots, starts, first, compressed, selection, t, split, T, C, SCALE, CAUSAL),
        *(WIDTH, BD, LENGTH, PICKED, BP, BE, SPLITS, TOKENS, PACKED, ROWS, STRIDE),
    )
    if SPLITS == 1:
        rows = out + t.to(tl.int64) * (H * WIDTH)
        if cos is not None:
            tables = t.to(tl.int64) * HALF
            finish_heads(maximum, total, values, sink, rows, cos + tables, sin + tables, head, H, WIDTH, HALF)
        else:
            finish_heads(maximum, total, values, sink, rows, None, None, head, H, WIDTH, HALF)
    else:
        part = (t.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * SPLITS + split
        row = part * BH + tl.arange(0, BH)
        tl.store(sums + row[:, None] * BD + tl.arange(0, BD)[None, :], values)
        tl.store(stats + 2 * row, maximum)
        tl.store(stats + 2 * row + 1, total)


@jit
def attention_join(
    kv: tl.tensor,
    window: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    sink: tl.tensor,
    out: tl.tensor,
    sums: tl.tensor,
    stats: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    T: tl.tensor,
    H: tl.constexpr,
    BH: tl.constexpr,
    WIDTH: tl.constexpr,
    BD: tl.constexpr,
    HALF: tl.constexpr,
    SPLITS: tl.constexpr,
    LENGTH: tl.constexpr,
    ROW: tl.constexpr,
    FORMAT: tl.constexpr,
) -> None:
    """One head of a token from its splits; block H of a token writes its key into the ring."""
    t = tl.program_id(0)
    head = tl.program_id(1)
    if head < H:
        part = (t.to(tl.int64) * ((H + BH - 1) // BH) + head // BH) * SPLITS
        row = part * BH + head % BH + tl.arange(0, 1)
        k = tl.arange(0, BD)[None, :]
        maximum = tl.full((1,), float("-inf"), tl.float32)
        for split in range(SPLITS):
            maximum = tl.maximum(maximum, tl.load(stats + 2 * (row + split * BH)))
        shift = tl.where(maximum == float("-inf"), 0.0, maximum)
        total = tl.zeros((1,), tl.float32)
        values = tl.zeros((1, BD), tl.float32)
        for split in range(SPLITS):
            place = row + split * BH
            decay = tl.exp(tl.load(stats + 2 * place) - shift)
            total += tl.load(stats + 2 * place + 1) * decay
            values += tl.load(sums + place[:, None] * BD + k) * decay[:, None]
        rows = out + t.to(tl.int64) * (H * WIDTH)
        heads = head + tl.arange(0, 1)
        if cos is not None:
            tables = t.to(tl.int64) * HALF
            finish_heads(maximum, total, values, sink, rows, cos + tables, sin + tables, heads, H, WIDTH, HALF)
        else:
            finish_heads(maximum, total, values, sink, rows, None, None, heads, H, WIDTH, HALF)
    elif window is not None:
        position = tl.load(positions + t)
        slot = tl.load(slots + t)
        if is_newest(positions, slots, t, T, position, slot, LENGTH):
            k = tl.arange(0, BD)
            values = tl.load(kv + t.to(tl.int64) * WIDTH + k, mask=k < WIDTH, other=0.0).to(tl.float32)
            write_row(window + (slot.to(tl.int64) * LENGTH + position % LENGTH) * ROW, values, FORMAT, 32, WIDTH, BD)
