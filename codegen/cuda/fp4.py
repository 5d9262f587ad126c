"""Stored e2m1 weights: eight values of a 32-bit word at a time, in two instructions each.

The code s ee m of a value v, moved to the bits s 000000ee m000000 of a bf16, reads as v · 2^-126, subnormals included:
e2m1 counts its exponents from 1 as bf16 counts them from 127. Two such numbers fit into a word, so that a shift and a
mask serve two values. Nibble j of a word is the value 8 · word + j of its row.
"""

from __future__ import annotations

import triton.language as tl

from v41c.codegen.cuda.language import jit
from v41c.codegen.cuda.numeric import decode_e8m0

#: `weight_tile` leaves this factor out of its values, so that 2^126 · 2^(code - 127) is a bf16 up to code 192
TILE_UNIT = tl.constexpr(2.0**64)


@jit
def spread(words: tl.tensor, FIRST: tl.constexpr) -> tl.tensor:
    """u32: nibbles FIRST (0…3) and FIRST + 4 of u32 words as the bf16 numbers v · 2^-126 of a low and a high half."""
    signs = words << (12 - 4 * FIRST)
    magnitudes = (words << (6 - 4 * FIRST)) if FIRST < 2 else (words >> (4 * FIRST - 6))
    return (signs & 0x80008000) | (magnitudes & 0x01C001C0)


@jit
def _pair(words: tl.tensor, FIRST: tl.constexpr) -> tl.tensor:
    """bf16 [..., 2]: nibbles FIRST and FIRST + 4."""
    both = spread(words, FIRST)
    low = both.to(tl.int16).to(tl.bfloat16, bitcast=True)
    return tl.join(low, (both >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True))


@jit
def _scale_codes(
    scale: tl.tensor, m: tl.tensor, start: tl.tensor, M: tl.constexpr, K: tl.constexpr, COUNT: tl.constexpr
) -> tl.tensor:
    """u8 codes [m, COUNT] of the scales of 32 columns each from `start` on; 0 outside of the weight."""
    group = start // 32 + tl.arange(0, COUNT)
    inside = (m[:, None] < M) & (group[None, :] < K // 32)
    return tl.load(scale + m[:, None] * (K // 32) + group[None, :], mask=inside, other=0)


@jit
def weight_tile(
    weight: tl.tensor,
    scale: tl.tensor,
    m: tl.tensor,
    start: tl.tensor,
    M: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
) -> tl.tensor:
    """bf16 [BM, BK]: weight[m, start + k] / TILE_UNIT, k in the order of `input_tile`.

    Exact for scales from 2^-61 to 2^65: a product's error is below 2^-70 · x under them, and it is infinite above.
    """
    word = start // 8 + tl.arange(0, BK // 8)
    inside = (m[:, None] < M) & (word[None, :] < K // 8)
    words = tl.load(weight + m[:, None] * (K // 8) + word[None, :], mask=inside, other=0).to(tl.uint32, bitcast=True)
    codes = _scale_codes(scale, m, start, M, K, BK // 32).to(tl.int32)
    factors = ((codes + 62) << 23).to(tl.float32, bitcast=True).to(tl.bfloat16)
    even, odd = tl.join(_pair(words, 0), _pair(words, 2)), tl.join(_pair(words, 1), _pair(words, 3))
    numbers = tl.permute(tl.join(even, odd), (0, 1, 3, 4, 2))
    return tl.reshape(tl.reshape(numbers, (BM, BK // 32, 32)) * factors[:, :, None], (BM, BK))


@jit
def weight_codes(
    weight: tl.tensor,
    scale: tl.tensor,
    m: tl.tensor,
    start: tl.tensor,
    M: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """u8 codes [BM, BK] of weight[m, start + k] in e4m3, and [BM, BK / 32] of the scales; zeros outside of it.

    The code s ee m, moved to the bits s 00ee m00 of an e4m3, reads as v · 2^-6, subnormals included. Scales are those
    of the weight times 2^6, up to 2^121.
    """
    byte = start // 2 + tl.arange(0, BK // 2)
    inside = (m[:, None] < M) & (byte[None, :] < K // 2)
    pairs = weight.to(tl.pointer_type(tl.uint8), bitcast=True) + m[:, None] * (K // 2) + byte[None, :]
    pair = tl.load(pairs, mask=inside, other=0)
    codes = tl.interleave(((pair & 8) << 4) | ((pair & 7) << 2), (pair & 0x80) | ((pair & 0x70) >> 2))
    scales = _scale_codes(scale, m, start, M, K, BK // 32)
    return codes, tl.where(scales < 249, scales + 6, 255).to(tl.uint8)


@jit
def input_tile(values: tl.tensor, BT: tl.constexpr, BK: tl.constexpr) -> tl.tensor:
    """[BT, BK] of [BT, BK]: the values of every eight in the order 0 4 1 5 2 6 3 7, in which words hold pairs."""
    return tl.reshape(tl.permute(tl.reshape(values, (BT, BK // 8, 2, 4)), (0, 1, 3, 2)), (BT, BK))


@jit
def _add_products(sums: tl.tensor, words: tl.tensor, FIRST: tl.constexpr, low: tl.tensor, high: tl.tensor) -> tl.tensor:
    """f32 [BM, BW]: sums + values FIRST of words · low [BW] + values FIRST + 4 · high [BW]."""
    both = spread(words, FIRST)
    sums = tl.fma((both << 16).to(tl.float32, bitcast=True), tl.broadcast_to(low[None, :], sums.shape), sums)
    value = (both & 0xFFFF0000).to(tl.float32, bitcast=True)
    return tl.fma(value, tl.broadcast_to(high[None, :], sums.shape), sums)


@jit
def row_products(
    weight: tl.tensor,
    scale: tl.tensor,
    m: tl.tensor,
    start: tl.tensor,
    inputs: tl.tensor,
    M: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    BW: tl.constexpr,
) -> tl.tensor:
    """f32 [BM, BW / 4]: Σ over each group of 32 of weight[m, k] · x[k], the group starting at k = start + 32 · column.

    `inputs` f32 [BW, 8] is 2^64 · x, which makes normal numbers of products with v · 2^-126.
    """
    word = start // 8 + tl.arange(0, BW)
    inside = (m[:, None] < M) & (word[None, :] < K // 8)
    words = tl.load(weight + m[:, None] * (K // 8) + word[None, :], mask=inside, other=0).to(tl.uint32, bitcast=True)
    codes = _scale_codes(scale, m, start, M, K, BW // 4)
    even, odd = tl.split(tl.reshape(inputs, (BW, 2, 2, 2)))
    x04, x26 = tl.split(even)
    x15, x37 = tl.split(odd)
    x0, x4 = tl.split(x04)
    x1, x5 = tl.split(x15)
    x2, x6 = tl.split(x26)
    x3, x7 = tl.split(x37)
    sums = _add_products(tl.zeros((BM, BW), tl.float32), words, 0, x0, x4)
    sums = _add_products(sums, words, 1, x1, x5)
    sums = _add_products(sums, words, 2, x2, x6)
    sums = _add_products(sums, words, 3, x3, x7)
    groups = tl.sum(tl.reshape(sums, (BM, BW // 4, 4)), axis=2)
    return (groups * 2.0**62) * decode_e8m0(codes)
