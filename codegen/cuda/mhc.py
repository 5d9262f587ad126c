"""What the residual operations share: one pass over a tile of tokens, whose last block to finish runs the tail.

A block takes some tokens and a chunk of columns of all copies. It stores the new stream, the mix of it before its norm
(where the normed mix will be), and partial sums: the coefficients' products, the squares of the stream and of the mix.
What needs whole rows follows in the block of the tile that finishes last: `mhc_tail`.

The coefficients' product is f32. For few tokens and for f32 streams it runs on the vector units. For many, the weight
is split into three bf16 numbers, whose sum it is exactly, and the tensor cores multiply each by the bf16 stream:
exact products, f32 sums.

Memory traffic a token of n copies of width d: (n + 1)·d values read, (n + 1)·d written. Beside it, in the second-level
cache: the mix again, d values read and d written; partial sums, 4·ROWS bytes written and read for each chunk; the
coefficients' weight, 4·(2 + n)·n·n·d bytes for each tile of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import triton.language as tl

from v41c.codegen.cuda.frame import Buffer, Frame
from v41c.codegen.cuda.language import jit
from v41c.codegen.cuda.mhc_tail import tail
from v41c.codegen.cuda.rows import power_of_two
from v41c.ir.types import DType, TensorType


@dataclass(frozen=True)
class Tiling:
    """Blocks of `tokens` by `steps` times `columns`, columns of a step of the tail, threads in warps, pipeline."""

    tokens: int
    columns: int
    steps: int
    tail: int
    warps: int
    stages: int
    #: whether the tensor cores multiply
    matrix: bool


def tiling(stream: TensorType, tokens: int) -> Tiling:
    """The tile for a stream [T, N, D] of at most `tokens` tokens.

    The weight of the coefficients is read once a tile of tokens, and one block runs a tile's tail: few tokens a tile
    for few, so that there are blocks for all multiprocessors and tails run side by side; many for many, so that the
    weight's traffic stays below the stream's. One token: 32 columns make 160 blocks of a release's 5,120. Four tokens
    by 64 columns are 8,192 sums, 64 a thread of 4 warps, and 80 blocks a tile. On the tensor cores, 8 columns a thread
    are 16 bytes of each copy, 16 tokens by 64 columns 4 warps full; a pipeline of three steps, 44 KiB each, twice a
    multiprocessor, holds enough in flight. The tail has 32 to 64 values a thread in each of its pipeline's stages: one
    block hides the cache's latency alone.
    """
    whole = max(32, power_of_two(int(stream.shape[2])))
    if tokens == 1:
        return Tiling(1, 32, 1, min(4096, whole), 4, 1, False)
    if tokens <= 16 or stream.dtype == DType.F32:
        return Tiling(4, min(64, whole), 1, min(1024, whole), 4, 1, False)
    if tokens <= 1024:
        return Tiling(16, min(64, whole), 2, min(512, whole), 4, 3, True)
    return Tiling(64, 32, 8, min(256, whole), 8, 3, True)


def entered(frame: Frame, first: int) -> dict[str, Buffer | None]:
    """The results from number `first` on of an operation that enters a sublayer: u, its round trip, coefficients."""
    names = ["u", *(["quantized"] if frame.op.attributes()["format"] != "none" else [])]
    names += ["next_pre", "next_post", "next_comb"]
    return {name: frame.result(first + index) for index, name in enumerate(names)}


def launch_boundary(frame: Frame, buffers: Mapping[str, Buffer | None]) -> None:
    """Launch the pass for an operation with operands stream, fn, scale and base and attributes of coefficients.

    `buffers`: what the operation has of y, post, comb, updated (an update), pre, weight, u (a sublayer's input),
    quantized (its round trip), and the coefficients next_pre, next_post and next_comb.
    """
    kind, attributes = frame.type_of("stream"), frame.op.attributes()
    tokens, copies, width = kind.shape[0], int(kind.shape[1]), int(kind.shape[2])
    bound = frame.bound(tokens)
    tile = tiling(kind, bound)
    outputs = (2 + copies) * copies
    rows = max(16, power_of_two(outputs + 2))
    chunks = -(-width // (tile.columns * tile.steps))
    tiles = -(-bound // tile.tokens)
    names = ("y", "post", "comb", "updated", "pre", "weight", "u", "quantized", "next_pre", "next_post", "next_comb")
    frame.launch(
        boundary_chunk,
        {name: buffers.get(name) for name in names}
        | {name: frame.operand(name) for name in ("stream", "fn", "scale", "base")}
        | {"partials": frame.workspace(tiles * tile.tokens * chunks * rows, "fp32")}
        | {"counters": frame.counters(tiles), "T": frame.extent(tokens), "N": copies, "D": width, "ROWS": rows}
        | {"BT": tile.tokens, "BD": tile.columns, "STEPS": tile.steps, "CHUNKS": chunks, "TAIL": tile.tail}
        | {"MATRIX": tile.matrix, "FORMAT": attributes.get("format"), "ITERATIONS": int(attributes["iterations"])}
        | {"NORM_EPS": float(attributes["norm_eps"]), "EPS": float(attributes["eps"])},
        (frame.tiles(tokens, tile.tokens, chunks),),
        warps=tile.warps,
        stages=tile.stages,
    )


@jit
def boundary_chunk(
    stream: tl.tensor,
    y: tl.tensor,
    post: tl.tensor,
    comb: tl.tensor,
    pre: tl.tensor,
    fn: tl.tensor,
    scale: tl.tensor,
    base: tl.tensor,
    weight: tl.tensor,
    updated: tl.tensor,
    u: tl.tensor,
    quantized: tl.tensor,
    next_pre: tl.tensor,
    next_post: tl.tensor,
    next_comb: tl.tensor,
    partials: tl.tensor,
    counters: tl.tensor,
    T: tl.tensor,
    N: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
    STEPS: tl.constexpr,
    CHUNKS: tl.constexpr,
    TAIL: tl.constexpr,
    MATRIX: tl.constexpr,
    FORMAT: tl.constexpr,
    ITERATIONS: tl.constexpr,
    NORM_EPS: tl.constexpr,
    EPS: tl.constexpr,
) -> None:
    """STEPS times BD columns of a tile of BT tokens; blocks of a tile follow one another."""
    tile = tl.program_id(0) // CHUNKS
    chunk = tl.program_id(0) % CHUNKS
    t = tile * BT + tl.arange(0, BT)
    sums = _chunk_sums(stream, y, post, comb, pre, fn, updated, u, t, T, chunk, N, D, ROWS, BT, BD, STEPS, MATRIX)
    row = tl.arange(0, ROWS)
    place = partials + (t[:, None].to(tl.int64) * CHUNKS + chunk) * ROWS + row[None, :]
    tl.store(place, sums, mask=t[:, None] < T)
    # every thread's stores come before the count, and other blocks' stores before what is read after it
    tl.debug_barrier()
    finished = tl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu")
    if finished == CHUNKS - 1:
        tl.store(counters + tile, 0)
        tail(
            partials,
            scale,
            base,
            weight,
            u,
            quantized,
            next_pre,
            next_post,
            next_comb,
            t,
            T,
            N,
            D,
            ROWS,
            BT,
            CHUNKS,
            TAIL,
            FORMAT,
            ITERATIONS,
            NORM_EPS,
            EPS,
        )


@jit
def _chunk_sums(
    stream: tl.tensor,
    y: tl.tensor,
    post: tl.tensor,
    comb: tl.tensor,
    pre: tl.tensor,
    fn: tl.tensor,
    updated: tl.tensor,
    u: tl.tensor,
    t: tl.tensor,
    T: tl.tensor,
    chunk: tl.tensor,
    N: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
    STEPS: tl.constexpr,
    MATRIX: tl.constexpr,
) -> tl.tensor:
    """f32 [BT, ROWS]: the products with the rows of fn, then the squares of the new stream and of its bf16 mix."""
    OUTPUTS: tl.constexpr = (2 + N) * N
    inside = t < T
    rows = t.to(tl.int64)
    gains = _factors(post + rows * N, inside, N) if y is not None else ()
    mixes = _factors(comb + rows * (N * N), inside, N * N) if y is not None else ()
    shares = _factors(pre + rows * N, inside, N) if u is not None else ()
    sums = tl.zeros((BT, ROWS) if MATRIX else (BT, ROWS, BD), tl.float32)
    squares = tl.zeros((BT, BD), tl.float32)
    mix_squares = tl.zeros((BT, BD), tl.float32)
    for step in range(STEPS):
        column = (chunk * STEPS + step) * BD + tl.arange(0, BD)
        mask = inside[:, None] & (column[None, :] < D)
        place = rows[:, None] * (N * D) + column[None, :]
        copies: tl.tuple = ()
        for copy in tl.static_range(N):
            copies += (tl.load(stream + place + copy * D, mask=mask, other=0.0),)
        if y is not None:
            added = tl.load(y + rows[:, None] * D + column[None, :], mask=mask, other=0.0).to(tl.float32)
        mix = tl.zeros((BT, BD), tl.float32)
        for copy in tl.static_range(N):
            if y is not None:
                total = mixes[copy][:, None] * copies[0].to(tl.float32)
                for source in tl.static_range(1, N):
                    total += mixes[source * N + copy][:, None] * copies[source].to(tl.float32)
                values = (gains[copy][:, None] * added + total).to(stream.dtype.element_ty)
                tl.store(updated + place + copy * D, values, mask=mask)
            else:
                values = copies[copy]
            wide = values.to(tl.float32)
            squares += wide * wide
            if u is not None:
                mix += shares[copy][:, None] * wide
            sums = _add_products(sums, values, fn + copy * D, column, N, D, ROWS, MATRIX)
        if u is not None:
            rounded = mix.to(u.dtype.element_ty)
            tl.store(u + rows[:, None] * D + column[None, :], rounded, mask=mask)
            mix_squares += rounded.to(tl.float32) * rounded.to(tl.float32)
    products = sums if MATRIX else tl.sum(sums, axis=2)
    row = tl.arange(0, ROWS)[None, :]
    totals = tl.where(row == OUTPUTS, tl.sum(squares, axis=1)[:, None], products)
    return tl.where(row == OUTPUTS + 1, tl.sum(mix_squares, axis=1)[:, None], totals)


@jit
def _factors(pointers: tl.tensor, inside: tl.tensor, COUNT: tl.constexpr) -> tl.tuple:
    """COUNT vectors f32 [BT], zero for absent tokens.

    Each passes through a sum of one element: the compiler carries the layout of a product's operand backwards through
    everything up to loads, and would compute the new stream twice, the second time once for each warp. It stops here.
    """
    factors: tl.tuple = ()
    for index in tl.static_range(COUNT):
        factors += (tl.sum(tl.load(pointers[:, None] + index, mask=inside[:, None], other=0.0), axis=1),)
    return factors


@jit
def _add_products(
    sums: tl.tensor,
    values: tl.tensor,
    fn: tl.tensor,
    column: tl.tensor,
    N: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    MATRIX: tl.constexpr,
) -> tl.tensor:
    """sums plus values [BT, BD] times the columns of fn: [BT, ROWS], or before its sum [BT, ROWS, BD]."""
    row = tl.arange(0, ROWS)
    mask = (row[:, None] < (2 + N) * N) & (column[None, :] < D)
    factors = tl.load(fn + row[:, None] * (N * D) + column[None, :], mask=mask, other=0.0)
    if MATRIX:
        high = factors.to(tl.bfloat16)
        rest = factors - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        sums = tl.dot(values, tl.trans(high), sums)
        sums = tl.dot(values, tl.trans(middle), sums)
        sums = tl.dot(values, tl.trans(low), sums)
    else:
        sums += values.to(tl.float32)[:, None, :] * factors[None, :, :]
    return sums
