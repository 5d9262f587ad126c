"""What the last block of a tile of tokens does for whole rows: the norm of the mix, and the next coefficients."""

from __future__ import annotations

import triton.language as tl

from v41c.codegen.cuda.language import jit
from v41c.codegen.cuda.numeric import quantize_groups, round_groups

#: f32 values that a block adds at a time: 32 a thread of 4 warps
_TOGETHER = tl.constexpr(4096)
#: of the pipelines of loads of what other blocks stored
STAGES = tl.constexpr(3)


@jit
def tail(
    partials: tl.tensor,
    scale: tl.tensor,
    base: tl.tensor,
    weight: tl.tensor,
    u: tl.tensor,
    quantized: tl.tensor,
    next_pre: tl.tensor,
    next_post: tl.tensor,
    next_comb: tl.tensor,
    t: tl.tensor,
    T: tl.tensor,
    N: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BT: tl.constexpr,
    CHUNKS: tl.constexpr,
    TAIL: tl.constexpr,
    FORMAT: tl.constexpr,
    ITERATIONS: tl.constexpr,
    NORM_EPS: tl.constexpr,
    EPS: tl.constexpr,
) -> None:
    """Add the partial sums of BT tokens; norm their mixes in `u`; store their coefficients."""
    OUTPUTS: tl.constexpr = (2 + N) * N
    totals = _totals(partials, t, T, ROWS, BT, CHUNKS)
    row = tl.arange(0, ROWS)[None, :]
    if u is not None:
        squares = tl.sum(tl.where(row == OUTPUTS + 1, totals, 0.0), axis=1)
        _norm(u, weight, quantized, tl.math.rsqrt(squares / D + NORM_EPS), t, T, D, BT, TAIL, FORMAT)
    squares = tl.sum(tl.where(row == OUTPUTS, totals, 0.0), axis=1)
    products = totals * tl.math.rsqrt(squares / (N * D) + NORM_EPS)[:, None]
    _coefficients(products, scale, base, next_pre, next_post, next_comb, t, T, N, BT, ITERATIONS, EPS)


@jit
def _totals(
    partials: tl.tensor, t: tl.tensor, T: tl.tensor, ROWS: tl.constexpr, BT: tl.constexpr, CHUNKS: tl.constexpr
) -> tl.tensor:
    """f32 [BT, ROWS]: sums over the chunks, in ascending order of groups of them."""
    GROUP: tl.constexpr = max(1, _TOGETHER // (BT * ROWS))
    totals = tl.zeros((BT, ROWS), tl.float32)
    rows = t[:, None, None].to(tl.int64) * CHUNKS
    for first in tl.range(0, CHUNKS, GROUP, num_stages=STAGES):
        chunk = first + tl.arange(0, GROUP)[None, :, None]
        place = partials + (rows + chunk) * ROWS + tl.arange(0, ROWS)[None, None, :]
        mask = (t[:, None, None] < T) & (chunk < CHUNKS)
        totals += tl.sum(tl.load(place, mask=mask, other=0.0, cache_modifier=".cg"), axis=1)
    return totals


@jit
def _norm(
    u: tl.tensor,
    weight: tl.tensor,
    quantized: tl.tensor,
    factor: tl.tensor,
    t: tl.tensor,
    T: tl.tensor,
    D: tl.constexpr,
    BT: tl.constexpr,
    TAIL: tl.constexpr,
    FORMAT: tl.constexpr,
) -> None:
    """u [BT, D] times `factor` [BT] and weight [D] in place, and its round trip to a format of groups of 32.

    Of an fp8 format, `quantized` may be packed rows: u8.
    """
    for start in tl.range(0, D, TAIL, num_stages=STAGES):
        column = start + tl.arange(0, TAIL)
        mask = (t[:, None] < T) & (column[None, :] < D)
        place = t[:, None].to(tl.int64) * D + column[None, :]
        mix = tl.load(u + place, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
        factors = tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32)
        values = (factors[None, :] * (mix * factor[:, None])).to(u.dtype.element_ty)
        tl.store(u + place, values, mask=mask)
        if quantized is not None:
            groups = tl.reshape(values.to(tl.float32), (BT, TAIL // 32, 32))
            if quantized.dtype.element_ty == tl.uint8:
                row = quantized + t[:, None].to(tl.int64) * (D + D // 32)
                codes, scales = quantize_groups(groups, FORMAT)
                tl.store(row + column[None, :], tl.reshape(codes, (BT, TAIL)).to(tl.uint8), mask=mask)
                group = start // 32 + tl.arange(0, TAIL // 32)
                inside = (t[:, None] < T) & (group[None, :] < D // 32)
                tl.store(row + D + group[None, :], scales.to(tl.uint8), mask=inside)
            else:
                rounded = tl.reshape(round_groups(groups, FORMAT), (BT, TAIL))
                tl.store(quantized + place, rounded.to(quantized.dtype.element_ty), mask=mask)


@jit
def _coefficients(
    products: tl.tensor,
    scale: tl.tensor,
    base: tl.tensor,
    next_pre: tl.tensor,
    next_post: tl.tensor,
    next_comb: tl.tensor,
    t: tl.tensor,
    T: tl.tensor,
    N: tl.constexpr,
    BT: tl.constexpr,
    ITERATIONS: tl.constexpr,
    EPS: tl.constexpr,
) -> None:
    """pre, post and comb from the scaled products [BT, ROWS]; copies beyond N stay zero and are not stored."""
    BN: tl.constexpr = N if N & (N - 1) == 0 else 4
    copy = tl.arange(0, BN)
    number = tl.minimum(copy, N - 1)
    rows = t[:, None].to(tl.int64)
    mask = (t[:, None] < T) & (copy[None, :] < N)
    pre = _affine(products, number, scale, base, BT, BN)
    tl.store(next_pre + rows * N + copy[None, :], _sigmoid(pre) + EPS, mask=mask)
    post = _affine(products, N + number, scale + 1, base, BT, BN)
    tl.store(next_post + rows * N + copy[None, :], 2.0 * _sigmoid(post), mask=mask)
    index = tl.reshape(number[:, None] * N + number[None, :], (BN * BN,))
    logits = tl.reshape(_affine(products, 2 * N + index, scale + 2, base, BT, BN * BN), (BT, BN, BN))
    comb = _sinkhorn(logits, (copy < N)[None, :, None] & (copy < N)[None, None, :], ITERATIONS, EPS)
    place = rows[:, :, None] * (N * N) + copy[None, :, None] * N + copy[None, None, :]
    inside = mask[:, :, None] & (copy < N)[None, None, :]
    tl.store(next_comb + place, comb, mask=inside)


@jit
def _affine(
    products: tl.tensor,
    index: tl.tensor,
    scale: tl.tensor,
    base: tl.tensor,
    BT: tl.constexpr,
    COUNT: tl.constexpr,
) -> tl.tensor:
    """products[:, index] · scale + base[index], f32 [BT, COUNT]."""
    picked = tl.gather(products, tl.broadcast_to(index[None, :], (BT, COUNT)), axis=1)
    return picked * tl.load(scale) + tl.load(base + index)[None, :]


@jit
def _sigmoid(values: tl.tensor) -> tl.tensor:
    return 1.0 / (1.0 + tl.exp(-values))


@jit
def _sinkhorn(logits: tl.tensor, inside: tl.tensor, ITERATIONS: tl.constexpr, EPS: tl.constexpr) -> tl.tensor:
    """A softmax over targets, then columns and rows normalised in turn, ending on columns; zero where not inside."""
    shifted = logits - tl.max(tl.where(inside, logits, float("-inf")), axis=2)[:, :, None]
    comb = tl.where(inside, tl.exp(shifted), 0.0)
    comb = comb / _positive(tl.sum(comb, axis=2))[:, :, None] + tl.where(inside, EPS, 0.0)
    comb = comb / _positive(tl.sum(comb, axis=1) + EPS)[:, None, :]
    for _ in range(ITERATIONS - 1):
        comb = comb / _positive(tl.sum(comb, axis=2) + EPS)[:, :, None]
        comb = comb / _positive(tl.sum(comb, axis=1) + EPS)[:, None, :]
    return comb


@jit
def _positive(sums: tl.tensor) -> tl.tensor:
    """Sums that nothing is zero of but the copies that are not there."""
    return tl.where(sums == 0.0, 1.0, sums)
