"""Scores of index keys for a few queries: a tile of rows by the heads of some tokens, on the tensor cores if packed.

Rows are the first operand, whose tiles come in 64s and 128s; e2m1 times a power of two is exact in bf16, and so are
queries, so products are exact and sums are f32.
"""

from __future__ import annotations

import triton.language as tl

from v41c.codegen.cuda.language import jit
from v41c.codegen.cuda.numeric import decode_e8m0
from v41c.codegen.cuda.packed_rows import read_fp4_rows, read_plain_rows


@jit
def read_queries(
    q: tl.tensor,
    first: tl.tensor,
    T: tl.tensor,
    TOKENS: tl.constexpr,
    H: tl.constexpr,
    BH: tl.constexpr,
    DI: tl.constexpr,
    BD: tl.constexpr,
) -> tl.tensor:
    """[BD, TOKENS · BH] of the heads of TOKENS tokens, zeros where there is none."""
    column = tl.arange(0, TOKENS * BH)[None, :]
    token, head = first + column // BH, column % BH
    d = tl.arange(0, BD)[:, None]
    place = q + (token.to(tl.int64) * H + head) * DI + d
    return tl.load(place, mask=(token < T) & (head < H) & (d < DI), other=0.0)


@jit
def read_weights(
    weights: tl.tensor,
    first: tl.tensor,
    T: tl.tensor,
    SCALE: tl.constexpr,
    TOKENS: tl.constexpr,
    H: tl.constexpr,
    BH: tl.constexpr,
) -> tl.tensor:
    """f32 [TOKENS · BH] of weight times SCALE, rounded to the weights' type; zeros where there is none."""
    column = tl.arange(0, TOKENS * BH)
    token, head = first + column // BH, column % BH
    weight = tl.load(weights + token.to(tl.int64) * H + head, mask=(token < T) & (head < H), other=0.0)
    return (weight.to(tl.float32) * SCALE).to(weights.dtype.element_ty).to(tl.float32)


@jit
def read_keys(
    keys: tl.tensor, rows: tl.tensor, inside: tl.tensor, DI: tl.constexpr, BD: tl.constexpr, PACKING: tl.constexpr
) -> tl.tensor:
    """[R, BD] of index keys by number (i64 [R]): bf16 of packed ones, f32 of plain ones; zeros if not `inside`."""
    if PACKING == "words":
        values = _read_words(keys, rows, inside, DI)
    elif PACKING == "bytes":
        values = read_fp4_rows(keys, rows, inside, DI, 32, True, BD).to(tl.bfloat16)
    else:
        values = read_plain_rows(keys, rows, inside, DI, DI, BD)
    return values


@jit
def _read_words(keys: tl.tensor, rows: tl.tensor, inside: tl.tensor, DI: tl.constexpr) -> tl.tensor:
    """Rows of i32 words: eight elements each, then four scales each. Rows of 68 bytes allow no wider loads."""
    WORDS: tl.constexpr = DI // 8
    SCALES: tl.constexpr = DI // 128
    R: tl.constexpr = rows.shape[0]
    start = (keys + rows * (WORDS + SCALES))[:, None]
    words = tl.load(start + tl.arange(0, WORDS)[None, :], mask=inside[:, None], other=0)
    scales = tl.load(start + WORDS + tl.arange(0, SCALES)[None, :], mask=inside[:, None], other=0)
    codes = tl.reshape((scales[:, :, None] >> (8 * tl.arange(0, 4))[None, None, :]) & 255, (R, SCALES * 4))
    nibbles = words[:, :, None] >> (4 * tl.arange(0, 8))[None, None, :]
    # as in packed_rows.decode_nibbles
    bits = ((nibbles & 7) << 22) | ((nibbles & 8) << 28)
    numbers = tl.reshape(bits.to(tl.float32, bitcast=True) * (2.0**126), (R, DI // 32, 32))
    return tl.reshape(numbers * decode_e8m0(codes)[:, :, None], (R, DI)).to(tl.bfloat16)


@jit
def score_rows(
    keys: tl.tensor, queries: tl.tensor, weights: tl.tensor, TOKENS: tl.constexpr, BH: tl.constexpr
) -> tl.tensor:
    """f32 [R, TOKENS]: Σ_h relu(q_h · key) · weight_h of keys [R, BD] and queries [BD, TOKENS · BH]."""
    products = tl.dot(keys, queries)
    weighted = tl.maximum(products, 0.0) * weights[None, :]
    return tl.sum(tl.reshape(weighted, (keys.shape[0], TOKENS, BH)), axis=2)


@jit
def score_rows_exactly(
    keys: tl.tensor,
    q: tl.tensor,
    weights: tl.tensor,
    SCALE: tl.constexpr,
    H: tl.constexpr,
    DI: tl.constexpr,
    BD: tl.constexpr,
) -> tl.tensor:
    """f32 [R, 1] of keys f32 [R, BD] for one token's q [H, DI] and weights [H], head by head on the vector units."""
    d = tl.arange(0, BD)
    total = tl.zeros((keys.shape[0],), tl.float32)
    for head in range(H):
        query = tl.load(q + head * DI + d, mask=d < DI, other=0.0).to(tl.float32)
        weight = (tl.load(weights + head).to(tl.float32) * SCALE).to(weights.dtype.element_ty).to(tl.float32)
        total += tl.maximum(tl.sum(keys * query[None, :], axis=1), 0.0) * weight
    return total[:, None]
