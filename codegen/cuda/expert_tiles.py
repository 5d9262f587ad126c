"""What the launches of `experts` share: whose rows a block takes, and its products with one or two weights."""

from __future__ import annotations

import triton.language as tl

from v41c.codegen.cuda.fp4 import TILE_UNIT, input_tile, row_products, weight_codes, weight_tile
from v41c.codegen.cuda.language import jit
from v41c.codegen.cuda.packed_rows import load_fp8, packed_row, packed_tile
from v41c.codegen.cuda.product import add_dot, add_scaled_dot, load_codes, load_weight


@jit
def sort_pairs(
    ids: tl.tensor,
    starts: tl.tensor,
    order: tl.tensor,
    T: tl.tensor,
    CHOICES: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
) -> None:
    """Pairs t · CHOICES + choice by expert, then by number, and where each expert's begin (EXPERTS + 1 of them).

    A pair's place is how many come before it, which every thread counts for itself.
    """
    query = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    pair = query - (EXPERTS + 1)
    count = T * CHOICES
    own = (pair >= 0) & (pair < count)
    expert = tl.where(pair < 0, query, tl.load(ids + pair, mask=own, other=0))
    if tl.program_id(0) * BLOCK < EXPERTS + 1 + count:
        before = tl.zeros((BLOCK,), tl.int32)
        for first in range(0, count, STEP):
            other = first + tl.arange(0, STEP)
            chosen = tl.load(ids + other, mask=other < count, other=EXPERTS + 1)
            less = (chosen[None, :] == expert[:, None]) & (other[None, :] < pair[:, None])
            less = less | (chosen[None, :] < expert[:, None])
            before += tl.sum(less.to(tl.int32), axis=1)
        tl.store(starts + query, before, mask=pair < 0)
        tl.store(order + before, pair, mask=own)


@jit
def assigned(
    ids: tl.tensor,
    starts: tl.tensor,
    order: tl.tensor,
    T: tl.tensor,
    place: tl.tensor,
    CHOICES: tl.constexpr,
    EXPERTS: tl.constexpr,
    SHARED: tl.constexpr,
    BT: tl.constexpr,
    BOUND: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """What the block at `place` does: (routed, shared, expert, rows).

    rows [BT] are pairs of a routed expert, or tokens of the shared one; -1 for none. SHARED is how many places of a
    token, or of all sorted ones, are the shared expert's. BOUND is at least the choices, or the experts if sorted.
    """
    column = tl.arange(0, BT)
    if starts is None:
        token, choice = place // (CHOICES + SHARED), place % (CHOICES + SHARED)
        own = choice < CHOICES
        expert = tl.load(ids + token * CHOICES + choice, mask=own, other=-1)
        if BT == 1:
            routed, shared = own, choice >= CHOICES
            rows = column + tl.where(own, token * CHOICES + choice, token)
        else:
            slot = tl.arange(0, BOUND)
            inside = (column[:, None] < T) & (slot[None, :] < CHOICES)
            pair = column[:, None] * CHOICES + slot[None, :]
            equal = inside & (tl.load(ids + pair, mask=inside, other=-1) == expert)
            first = tl.min(tl.min(tl.where(equal, pair, BT * CHOICES), axis=1), axis=0)
            routed, shared = own & (first == token * CHOICES + choice), (choice >= CHOICES) & (token == 0)
            rows = tl.where(own, tl.max(tl.where(equal, pair, -1), axis=1), tl.where(column < T, column, -1))
    else:
        number = tl.arange(0, BOUND)
        start = tl.load(starts + number, mask=number < EXPERTS, other=0)
        end = tl.load(starts + number + 1, mask=number < EXPERTS, other=0)
        tile = place - SHARED - (start // BT + number)
        found = (number < EXPERTS) & (tile >= 0) & (tile * BT < end - start)
        expert = tl.max(tl.where(found, number, -1), axis=0)
        routed, shared = expert >= 0, place * BT < tl.minimum(T, SHARED * BT)
        pair = tl.max(tl.where(found, start + tile * BT, 0), axis=0) + column
        rows = tl.load(order + pair, mask=pair < tl.max(tl.where(found, end, 0), axis=0), other=-1)
        token = place * BT + column
        rows = tl.where(shared, tl.where(token < T, token, -1), rows)
    return routed, shared, expert, rows


@jit
def products(
    x: tl.tensor,
    inputs: tl.tensor,
    weight: tl.tensor,
    scale: tl.tensor,
    second: tl.tensor,
    second_scale: tl.tensor,
    expert: tl.tensor,
    m: tl.tensor,
    M: tl.constexpr,
    K: tl.constexpr,
    ROW: tl.constexpr,
    BM: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    FP4: tl.constexpr,
    SCALED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """f32 [BT, BM]: x[inputs] · weight[expert, m]ᵀ, and the same of a second weight (or again); inputs of -1 give 0.

    Rows of x lie ROW elements apart; those that are u8 are packed ones.
    """
    COLUMNS: tl.constexpr = K // 8 if FP4 else K
    SCALES: tl.constexpr = M * (K // 32) if FP4 else ((M + 31) // 32) * ((K + 31) // 32)
    own = weight + expert.to(tl.int64) * (M * COLUMNS)
    own_scale = scale
    if scale is not None:
        own_scale = scale + expert.to(tl.int64) * SCALES
    other, other_scale = second, second_scale
    if second is not None:
        other = second + expert.to(tl.int64) * (M * COLUMNS)
        if second_scale is not None:
            other_scale = second_scale + expert.to(tl.int64) * SCALES
    if BT == 1:
        row = x + tl.max(inputs, axis=0) * ROW
        sums, others = _row(row, own, own_scale, other, other_scale, m, M, K, BM, BK, FP4)
        result, second_result = sums[None, :], others[None, :]
    else:
        rows = x + tl.maximum(inputs, 0) * ROW
        sums, others = _tile(rows, inputs >= 0, own, own_scale, other, other_scale, m, M, K, BM, BT, BK, FP4, SCALED)
        result, second_result = tl.trans(sums), tl.trans(others)
    return result, second_result


@jit
def _row(
    x: tl.tensor,
    weight: tl.tensor,
    scale: tl.tensor,
    second: tl.tensor,
    second_scale: tl.tensor,
    m: tl.tensor,
    M: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    FP4: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """f32 [BM] of one token's row, on the vector units."""
    WIDTH: tl.constexpr = BK // 32 if FP4 else BK
    sums = tl.zeros((BM, WIDTH), tl.float32)
    others = sums
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        if x.dtype.element_ty == tl.uint8:
            values = packed_row(x, start, K, BK)
        else:
            values = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)
        if FP4:
            values = values * TILE_UNIT
            sums += row_products(weight, scale, m, start, values, M, K, BM, BK // 8)
            if second is not None:
                others += row_products(second, second_scale, m, start, values, M, K, BM, BK // 8)
        else:
            sums += load_weight(weight, scale, m, k, M, K, BK // 32).to(tl.float32) * values[None, :]
            if second is not None:
                others += load_weight(second, second_scale, m, k, M, K, BK // 32).to(tl.float32) * values[None, :]
    return tl.sum(sums, axis=1), tl.sum(others, axis=1)


@jit
def _tile(
    rows: tl.tensor,
    inside: tl.tensor,
    weight: tl.tensor,
    scale: tl.tensor,
    second: tl.tensor,
    second_scale: tl.tensor,
    m: tl.tensor,
    M: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    FP4: tl.constexpr,
    SCALED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """f32 [BM, BT] on the tensor cores; the weight is their first operand, whose rows come in 64s.

    SCALED: they apply the scales of packed rows and of the weight. Hidden activations of another format are no such.
    """
    AS_STORED: tl.constexpr = SCALED and rows.dtype.element_ty == tl.uint8
    sums = tl.zeros((BM, BT), tl.float32)
    others = sums
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        scales = None
        if AS_STORED:
            values, scales = load_fp8(rows, inside, start, K, BK)
        elif rows.dtype.element_ty == tl.uint8:
            values = packed_tile(rows, inside, start, K, BT, BK)
        else:
            values = tl.load(rows[:, None] + k[None, :], mask=inside[:, None] & (k[None, :] < K), other=0.0)
        if FP4 and not AS_STORED:
            values = input_tile(values, BT, BK)
        sums = _dot(weight, scale, values, scales, sums, m, start, M, K, BM, BK, FP4)
        if second is not None:
            others = _dot(second, second_scale, values, scales, others, m, start, M, K, BM, BK, FP4)
    if FP4 and not AS_STORED:
        sums, others = sums * TILE_UNIT, others * TILE_UNIT
    return sums, others


@jit
def _dot(
    weight: tl.tensor,
    scale: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    sums: tl.tensor,
    m: tl.tensor,
    start: tl.tensor,
    M: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    FP4: tl.constexpr,
) -> tl.tensor:
    """sums + weight[m, start …] · values [BT, BK]ᵀ, which are codes if there are scales."""
    k = start + tl.arange(0, BK)
    if scales is not None:
        if FP4:
            codes, code_scales = weight_codes(weight, scale, m, start, M, K, BM, BK)
        else:
            codes, code_scales = load_codes(weight, scale, m, k, M, K, BK // 32)
        total = add_scaled_dot(codes, code_scales, values, scales, sums)
    else:
        if FP4:
            numbers = weight_tile(weight, scale, m, start, M, K, BM, BK)
        else:
            numbers = load_weight(weight, scale, m, k, M, K, BK // 32)
        total = add_dot(numbers, tl.trans(values), sums)
    return total
