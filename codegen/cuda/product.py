"""Products of activations with stored weights, whatever the weight is stored as.

A tile's sum runs over k in the same steps for every row, so that a token's result does not depend on its neighbours.
Where tiles alone would leave multiprocessors idle, k is split over several blocks; the last of a tile to finish adds
their sums in ascending k.

Weights are dequantised to what the tensor cores multiply: e4m3 times a power of two is exact in bf16, and so are
activations after their round trip, so products are exact and sums are f32. Tensor cores that apply power-of-two scales
to every 32 elements themselves (Blackwell's) take packed rows and fp8 weights as they are, at twice the rate. Hopper's
fp8 products would save as much, and spend it again on the vector units: with scales of 32 elements on both sides, every
accumulator has to be scaled and added once per instruction.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import triton.language as tl

from v41c.codegen.cuda.frame import Arguments, Buffer, Frame
from v41c.codegen.cuda.kernel import Constant
from v41c.codegen.cuda.language import jit
from v41c.codegen.cuda.numeric import decode_e8m0, round_groups
from v41c.codegen.cuda.packed_rows import load_fp8, packed_row, packed_tile, write_tile
from v41c.ir.types import Dim, DType
from v41c.targets.cuda import CudaTarget

#: blocks that share a tile's sum at most: the last of them reads the sums of all
_MOST_SPLITS = 16


@dataclass(frozen=True)
class Tiling:
    """A tile of output rows M (of the weight) by tokens T, over steps of K; threads in warps; a pipeline of loads."""

    m: int
    t: int
    k: int
    warps: int
    stages: int
    #: blocks that share the sum of a tile
    splits: int = 1
    #: the tensor cores apply the scales of packed rows and of the weight
    scaled: bool = False

    def tiles(self, rows: int, groups: int = 1) -> int:
        """Tiles of a weight of `groups` times `rows` rows for one tile of tokens."""
        return -(-rows // self.m) * groups

    def split(self, tiles: int, columns: int, blocks: int, least: int) -> Tiling:
        """With splits that make about `blocks` of `tiles`, each with `least` steps or more."""
        steps = -(-columns // self.k)
        wanted = max(1, min(-(-blocks // tiles), steps // least, _MOST_SPLITS))
        # as many as have something to do
        return replace(self, splits=-(-steps // -(-steps // wanted)))


def tiling(
    dtype: DType,
    rows: tuple[int, ...],
    columns: int,
    tokens: int,
    target: CudaTarget,
    groups: int = 1,
    least_rows: int = 1,
    packed: bool = False,
) -> Tiling:
    """The tile for weights of these rows times `groups`, at up to `tokens` tokens.

    Up to 16 tokens are memory-bound: a multiprocessor needs some 40 KB in flight, two blocks of 24 KB or more. One
    token: a step of 8 rows of 512 fp8 is 4 KB, 32 bytes a thread, six steps deep. Up to 16: the weight's rows fill the
    tensor cores' 64 and the tokens their 16, so that memory is read once; a step is 8 KB, four deep. More: 128 x 128
    reads a byte per 128 multiplications; 64 x 64 where those tiles are too few; f32 tiles of 32 x 32 stay in registers.
    """
    wide = dtype == DType.F32
    blocks, least = (2 * target.multiprocessors, 4) if tokens <= 16 else (target.multiprocessors, 16)
    if tokens == 1:
        m = max(8, least_rows)
        tile = Tiling(m, 1, (256 if wide else 512) * 8 // m, 4, 6)
    elif tokens <= 16:
        tile = Tiling(64, 16, 32 if wide else 128, 4, 4)
    elif wide:
        tile = Tiling(32, 32, 32, 4, 2)
    else:
        tile = Tiling(128, 128, 64, 8, 3)
        if _tiles(tile, rows, groups, tokens) < target.multiprocessors:
            tile = Tiling(64, 64, 64, 4, 4)
    if packed and tokens > 1 and dtype == DType.F8E4M3 and target.has_block_scaled_mma:
        tile = _scaled(tile, target)
    return tile.split(_tiles(tile, rows, groups, tokens), columns, blocks, least)


def _scaled(tile: Tiling, target: CudaTarget) -> Tiling:
    """The tile as tensor cores take it that apply scales: steps of 128 codes; 128 rows in tensor memory."""
    rows = 128 if target.has_tcgen05 else tile.m
    return replace(tile, m=rows, k=128, scaled=True)


def _tiles(tile: Tiling, rows: tuple[int, ...], groups: int, tokens: int) -> int:
    return sum(tile.tiles(count, groups) for count in rows) * -(-tokens // tile.t)


def shared_sums(
    frame: Frame, tile: Tiling, rows: int, tokens: Dim, groups: int = 1
) -> tuple[Buffer | Constant, Buffer | Constant]:
    """Workspace for the sums of blocks that share a tile, and the tiles' counters; None where none is shared."""
    if tile.splits == 1:
        return None, None
    tiles = tile.tiles(rows, groups) * -(-frame.bound(tokens) // tile.t)
    return frame.workspace(tiles * tile.splits * tile.m * tile.t, "fp32"), frame.counters(tiles)


def constants(frame: Frame, tile: Tiling, columns: int, tokens: Dim) -> Arguments:
    """The arguments of `product_block` that products of one input have in common."""
    shape: Arguments = {"T": frame.extent(tokens), "K": columns, "SPLITS": tile.splits}
    shape |= {"BM": tile.m, "BT": tile.t, "BK": tile.k, "STAGES": tile.stages, "SCALED": tile.scaled}
    return shape


@jit
def load_weight(
    weight: tl.tensor, scale: tl.tensor, m: tl.tensor, k: tl.tensor, M: tl.tensor, K: tl.constexpr, KS: tl.constexpr
) -> tl.tensor:
    """The weight's values [m, k]: f32 as they are, bf16 as they are, fp8 with scales of 32 x 32 as bf16.

    `k` must be 32 x KS consecutive columns, starting at a multiple of 32, for a scaled weight.
    """
    if scale is None:
        inside = (m[:, None] < M) & (k[None, :] < K)
        values = tl.load(weight + m[:, None].to(tl.int64) * K + k[None, :], mask=inside, other=0)
    else:
        codes, scales = load_codes(weight, scale, m, k, M, K, KS)
        numbers = tl.reshape(codes.to(tl.float8e4nv, bitcast=True).to(tl.bfloat16), (m.shape[0], KS, 32))
        values = tl.reshape(numbers * decode_e8m0(scales).to(tl.bfloat16)[:, :, None], (m.shape[0], KS * 32))
    return values


@jit
def load_codes(
    weight: tl.tensor, scale: tl.tensor, m: tl.tensor, k: tl.tensor, M: tl.tensor, K: tl.constexpr, KS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """u8 codes [m, k] of an fp8 weight with scales of 32 x 32, and [m, KS] of the scales; zeros outside of it."""
    SCALES: tl.constexpr = (K + 31) // 32
    inside = (m[:, None] < M) & (k[None, :] < K)
    codes = tl.load(weight + m[:, None].to(tl.int64) * K + k[None, :], mask=inside, other=0)
    group = tl.min(k, axis=0) // 32 + tl.arange(0, KS)
    inside = (m[:, None] < M) & (group[None, :] < SCALES)
    return codes, tl.load(scale + (m[:, None] // 32) * SCALES + group[None, :], mask=inside, other=0)


@jit
def product_block(
    x: tl.tensor,
    weight: tl.tensor,
    scale: tl.tensor,
    y: tl.tensor,
    partials: tl.tensor,
    counters: tl.tensor,
    T: tl.tensor,
    block: tl.tensor,
    t_block: tl.tensor,
    M: tl.tensor,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    SPLITS: tl.constexpr,
    BM: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    SCALED: tl.constexpr,
    GROUP: tl.constexpr,
    FORMAT: tl.constexpr,
) -> None:
    """y[t, g·M + m] = Σ_k x[t, g, k] · weight[g·M + m, k] for one block: a tile's sum over its share of k.

    M is a constant or a scalar. Blocks of a tile follow one another, then tiles of M rows, then groups. With a FORMAT
    of GROUP elements, y is rounded to its type, then to the format and back. Rows of x that are u8 are packed ones, and
    so are those of y, of bf16 that was rounded.
    """
    ROW: tl.constexpr = GROUPS * K + (K // 32 if x.dtype.element_ty == tl.uint8 else 0)
    tiles = (M + BM - 1) // BM
    STEPS: tl.constexpr = ((K + BK - 1) // BK + SPLITS - 1) // SPLITS
    tile = block // SPLITS
    split = block % SPLITS
    group = tile // tiles
    row = (tile % tiles) * BM + tl.arange(0, BM)
    m = group * M + row
    t = t_block * BT + tl.arange(0, BT)
    first = split * (STEPS * BK)
    source = x + t.to(tl.int64) * ROW + group * K
    if BT == 1:
        sums = row_sums(source, weight, scale, m, first, GROUPS * M, K, STEPS, BM, BK, STAGES)
    else:
        sums = tile_sums(source, weight, scale, m, t < T, first, GROUPS * M, K, STEPS, BM, BT, BK, SCALED)
    if SPLITS == 1:
        _store(y, sums, t, m, row, T, M, GROUPS, BM, BT, GROUP, FORMAT)
    else:
        number = t_block * (GROUPS * tiles) + tile
        inner = tl.arange(0, BM)[:, None] * BT + tl.arange(0, BT)[None, :]
        shared = partials + number.to(tl.int64) * (SPLITS * BM * BT) + inner
        tl.store(shared + split * (BM * BT), sums)
        # every thread's stores come before the count, and other blocks' stores before what is read after it
        tl.debug_barrier()
        finished = tl.atomic_add(counters + number, 1, sem="acq_rel", scope="gpu")
        if finished == SPLITS - 1:
            tl.store(counters + number, 0)
            total = tl.load(shared, cache_modifier=".cg")
            for other in tl.static_range(1, SPLITS):
                total += tl.load(shared + other * (BM * BT), cache_modifier=".cg")
            _store(y, total, t, m, row, T, M, GROUPS, BM, BT, GROUP, FORMAT)


@jit
def _store(
    y: tl.tensor,
    sums: tl.tensor,
    t: tl.tensor,
    m: tl.tensor,
    row: tl.tensor,
    T: tl.tensor,
    M: tl.tensor,
    GROUPS: tl.constexpr,
    BM: tl.constexpr,
    BT: tl.constexpr,
    GROUP: tl.constexpr,
    FORMAT: tl.constexpr,
) -> None:
    """y[t, m] of sums [BM, BT], of which those of rows from M on and tokens from T on are none."""
    PACKED: tl.constexpr = y.dtype.element_ty == tl.uint8
    dtype = tl.bfloat16 if PACKED else y.dtype.element_ty
    values = tl.trans(sums).to(dtype)
    rows = y + t.to(tl.int64) * (GROUPS * M + (GROUPS * M // GROUP if PACKED else 0))
    if PACKED:
        write_tile(rows, t < T, m, row < M, values.to(tl.float32), FORMAT, GROUP, GROUPS * M)
    else:
        if FORMAT is not None:
            groups = tl.reshape(values.to(tl.float32), (BT, BM // GROUP, GROUP))
            values = tl.reshape(round_groups(groups, FORMAT), (BT, BM)).to(dtype)
        tl.store(rows[:, None] + m[None, :], values, mask=(t[:, None] < T) & (row[None, :] < M))


@jit
def row_sums(
    x: tl.tensor,
    weight: tl.tensor,
    scale: tl.tensor,
    m: tl.tensor,
    first: tl.tensor,
    M: tl.tensor,
    K: tl.constexpr,
    STEPS: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
) -> tl.tensor:
    """f32 [BM, 1] of one token, on the vector units."""
    sums = tl.zeros((BM, BK), tl.float32)
    for step in tl.range(STEPS, num_stages=STAGES):
        start = first + step * BK
        k = start + tl.arange(0, BK)
        if x.dtype.element_ty == tl.uint8:
            values = packed_row(x, start, K, BK)
        else:
            values = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)
        sums += load_weight(weight, scale, m, k, M, K, BK // 32).to(tl.float32) * values[None, :]
    return tl.sum(sums, axis=1)[:, None]


@jit
def tile_sums(
    x: tl.tensor,
    weight: tl.tensor,
    scale: tl.tensor,
    m: tl.tensor,
    inside: tl.tensor,
    first: tl.tensor,
    M: tl.tensor,
    K: tl.constexpr,
    STEPS: tl.constexpr,
    BM: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    SCALED: tl.constexpr,
) -> tl.tensor:
    """f32 [BM, BT] on the tensor cores; the weight is their first operand, whose rows come in 64s.

    SCALED: they apply the scales of packed rows and of the weight, both as they are stored.
    """
    sums = tl.zeros((BM, BT), tl.float32)
    for step in range(STEPS):
        start = first + step * BK
        k = start + tl.arange(0, BK)
        if SCALED:
            values, scales = load_fp8(x, inside, start, K, BK)
            codes, code_scales = load_codes(weight, scale, m, k, M, K, BK // 32)
            sums = add_scaled_dot(codes, code_scales, values, scales, sums)
        else:
            if x.dtype.element_ty == tl.uint8:
                values = tl.trans(packed_tile(x, inside, start, K, BT, BK))
            else:
                values = tl.load(x[None, :] + k[:, None], mask=inside[None, :] & (k[:, None] < K), other=0.0)
            sums = add_dot(load_weight(weight, scale, m, k, M, K, BK // 32), values, sums)
    return sums


@jit
def add_scaled_dot(
    codes: tl.tensor, code_scales: tl.tensor, values: tl.tensor, scales: tl.tensor, sums: tl.tensor
) -> tl.tensor:
    """sums [M, T] + codes [M, K] · values [T, K]ᵀ, both u8 codes of e4m3, with e8m0 scales [M, K/32] and [T, K/32]."""
    right = tl.trans(values.to(tl.float8e4nv, bitcast=True))
    return tl.dot_scaled(codes.to(tl.float8e4nv, bitcast=True), code_scales, "e4m3", right, scales, "e4m3", sums)


@jit
def add_dot(numbers: tl.tensor, values: tl.tensor, sums: tl.tensor) -> tl.tensor:
    """sums + numbers · values: products of bf16 on the tensor cores, of anything else in f32."""
    if (numbers.dtype == tl.bfloat16) & (values.dtype == tl.bfloat16):
        total = tl.dot(numbers, values, sums)
    else:
        total = tl.dot(numbers.to(tl.float32), values.to(tl.float32), sums, input_precision="ieee")
    return total
