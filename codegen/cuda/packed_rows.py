"""Rows of caches, rings and activations: plain, or packed as `v41c.ir.formats` says, elements before scales."""

from __future__ import annotations

import triton.language as tl

from v41c.codegen.cuda.language import jit
from v41c.codegen.cuda.numeric import decode_e4m3, decode_e8m0, quantize_groups


@jit
def write_row(
    place: tl.tensor,
    values: tl.tensor,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Store f32 values [BLOCK], the first WIDTH of them meant, at `place`: plain without a FORMAT, else packed."""
    k = tl.arange(0, BLOCK)
    if FORMAT is None:
        tl.store(place + k, values, mask=k < WIDTH)
    else:
        codes, scales = quantize_groups(tl.reshape(values, (BLOCK // GROUP, GROUP)), FORMAT)
        codes = tl.reshape(codes, (BLOCK,))
        ELEMENT_BYTES: tl.constexpr = WIDTH if FORMAT == "fp8_e8m0_32" else WIDTH // 2
        if FORMAT == "fp8_e8m0_32":
            tl.store(place + k, codes.to(tl.uint8), mask=k < WIDTH)
        else:
            low, high = tl.split(tl.reshape(codes, (BLOCK // 2, 2)))
            byte = tl.arange(0, BLOCK // 2)
            tl.store(place + byte, (low | (high << 4)).to(tl.uint8), mask=byte < WIDTH // 2)
        group = tl.arange(0, BLOCK // GROUP)
        tl.store(place + ELEMENT_BYTES + group, scales.to(tl.uint8), mask=group < WIDTH // GROUP)


@jit
def write_tile(
    rows: tl.tensor,
    inside: tl.tensor,
    columns: tl.tensor,
    kept: tl.tensor,
    values: tl.tensor,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Store f32 values [R, B] in packed fp8 rows of WIDTH values at addresses [R], those `inside` and columns `kept`.

    Columns [B] are consecutive; a group of them is kept whole or not at all, and begins with the first.
    """
    R: tl.constexpr = values.shape[0]
    GROUPS: tl.constexpr = values.shape[1] // GROUP
    codes, scales = quantize_groups(tl.reshape(values, (R, GROUPS, GROUP)), FORMAT)
    codes = tl.reshape(codes, values.shape).to(tl.uint8)
    tl.store(rows[:, None] + columns[None, :], codes, mask=inside[:, None] & kept[None, :])
    group = tl.min(columns, axis=0) // GROUP + tl.arange(0, GROUPS)
    whole = tl.arange(0, GROUPS) * GROUP < tl.sum(kept.to(tl.int32), axis=0)
    place = rows[:, None] + WIDTH + group[None, :]
    tl.store(place, scales.to(tl.uint8), mask=inside[:, None] & whole[None, :])


@jit
def decode_nibbles(packed: tl.tensor) -> tl.tensor:
    """f32 values [..., 2 · B] of e2m1 codes in u8 bytes [..., B], by shifting their bits into those of a float.

    Three bits of exponent and mantissa, read as the lowest of an exponent and the highest of a mantissa, are the value
    times 2^-126, half a unit as a subnormal included; the product with 2^126 is exact.
    """
    wide = packed.to(tl.int32)
    low = ((wide & 7) << 22) | ((wide & 8) << 28)
    high = ((wide & 0x70) << 18) | ((wide & 0x80) << 24)
    return tl.interleave(low, high).to(tl.float32, bitcast=True) * (2.0**126)


@jit
def read_fp4_rows(
    cache: tl.tensor,
    rows: tl.tensor,
    inside: tl.tensor,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """f32 [R, BLOCK] of fp4 rows by number (i64 [R]); zeros in rows that are not `inside` and beyond WIDTH."""
    ROW: tl.constexpr = WIDTH // 2 + WIDTH // GROUP
    start = (cache + rows * ROW)[:, None]
    byte = tl.arange(0, BLOCK // 2)[None, :]
    packed = tl.load(start + byte, mask=inside[:, None] & (byte < WIDTH // 2), other=0)
    group = tl.arange(0, BLOCK // GROUP)[None, :]
    codes = tl.load(start + WIDTH // 2 + group, mask=inside[:, None] & (group < WIDTH // GROUP), other=0)
    scales = decode_e8m0(codes) if POWER_OF_TWO else decode_e4m3(codes)
    numbers = tl.reshape(decode_nibbles(packed), (rows.shape[0], BLOCK // GROUP, GROUP))
    return tl.reshape(numbers * scales[:, :, None], (rows.shape[0], BLOCK))


@jit
def read_fp8_rows(
    ring: tl.tensor, rows: tl.tensor, inside: tl.tensor, WIDTH: tl.constexpr, BLOCK: tl.constexpr
) -> tl.tensor:
    """f32 [R, BLOCK] of fp8 rows by number (i64 [R]); zeros in rows that are not `inside` and beyond WIDTH."""
    elements, scales = load_fp8(ring + rows * (WIDTH + WIDTH // 32), inside, 0, WIDTH, BLOCK)
    numbers = tl.reshape(decode_e4m3(elements), (rows.shape[0], BLOCK // 32, 32))
    return tl.reshape(numbers * decode_e8m0(scales)[:, :, None], (rows.shape[0], BLOCK))


@jit
def load_fp8(
    rows: tl.tensor, inside: tl.tensor, start: tl.tensor, WIDTH: tl.constexpr, BLOCK: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """u8 codes [R, BLOCK] of columns from `start` on of fp8 rows of WIDTH values at addresses [R], and of their scales.

    Codes are 0 in rows that are not `inside` and beyond WIDTH, and so are those of scales, which stand for 2^-127.
    """
    k = start + tl.arange(0, BLOCK)[None, :]
    codes = tl.load(rows[:, None] + k, mask=inside[:, None] & (k < WIDTH), other=0)
    group = start // 32 + tl.arange(0, BLOCK // 32)[None, :]
    scales = tl.load(rows[:, None] + WIDTH + group, mask=inside[:, None] & (group < WIDTH // 32), other=0)
    return codes, scales


@jit
def packed_row(row: tl.tensor, start: tl.tensor, K: tl.constexpr, BK: tl.constexpr) -> tl.tensor:
    """f32 [BK]: columns from `start`, a multiple of 32, on of a packed fp8 row of K values; zeros beyond K."""
    k = start + tl.arange(0, BK)
    codes = tl.load(row + k, mask=k < K, other=0)
    group = start // 32 + tl.arange(0, BK // 32)
    scales = tl.load(row + K + group, mask=group < K // 32, other=0)
    return tl.reshape(tl.reshape(decode_e4m3(codes), (BK // 32, 32)) * decode_e8m0(scales)[:, None], (BK,))


@jit
def packed_tile(
    rows: tl.tensor, inside: tl.tensor, start: tl.tensor, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr
) -> tl.tensor:
    """bf16 [BT, BK], exact: the same columns of packed rows [BT]; zeros in those that are not `inside`."""
    codes, scales = load_fp8(rows, inside, start, K, BK)
    numbers = tl.reshape(codes.to(tl.float8e4nv, bitcast=True).to(tl.bfloat16), (BT, BK // 32, 32))
    return tl.reshape(numbers * decode_e8m0(scales).to(tl.bfloat16)[:, :, None], (BT, BK))


@jit
def read_plain_rows(
    source: tl.tensor,
    rows: tl.tensor,
    inside: tl.tensor,
    WIDTH: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """[R, BLOCK] of unpacked rows by number (i64 [R]), STRIDE apart; zeros if not `inside` and beyond WIDTH."""
    k = tl.arange(0, BLOCK)[None, :]
    place = source + rows[:, None] * STRIDE + k
    return tl.load(place, mask=inside[:, None] & (k < WIDTH), other=0.0)
