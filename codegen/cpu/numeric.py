"""Functions of f32 vectors, and the number formats by integer code: decoding, rounding, encoding, scales.

Rounding is to nearest, halves to even. The formats' rules are in `ir.formats`.
"""

from __future__ import annotations

import struct

from tvm.script.ir_builder import tirx as T

from v41c.codegen.cpu.tir import (
    Expr,
    absolute,
    bits,
    cast,
    const,
    fma,
    from_bits,
    iconst,
    lanes_of,
    let,
    mask,
    maximum,
    minimum,
    nearest,
    product,
    rounded,
    select,
    shl,
    shr,
)

_LOG2E = 1.4426950408889634
# ln 2 in two parts, the first with trailing zeros so that its products with small integers are exact
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
# minimax polynomial of (exp(r) − 1 − r) / r² on |r| ≤ ln(2) / 2 (Cephes, expf)
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
# erfc(z) = t · exp(polynomial of t − z²), t = 1 / (1 + z / 2), within 1.2e-7 of it for z ≥ 0 (Chebyshev; Press et al.,
# "Numerical Recipes", section 6.2)
_ERFC = (
    *(0.17087277, -0.82215223, 1.48851587, -1.13520398, 0.27886807),
    *(-0.18628806, 0.09678418, 0.37409196, 1.00002368, -1.26551223),
)


def exp(x: Expr) -> Expr:
    """e^x in f32: relative error below 1.2e-7 in the normal range, gradual underflow, 0 and inf outside, NaN kept."""
    lanes = lanes_of(x)
    x = let(maximum(const(-105.0, lanes), minimum(const(90.0, lanes), x)))
    n = let(nearest(x * const(_LOG2E, lanes)))
    r = let(fma(n, const(-_LN2_LOW, lanes), fma(n, const(-_LN2_HIGH, lanes), x)))
    p = const(_EXP[0], lanes)
    for coefficient in _EXP[1:]:
        p = fma(p, r, const(coefficient, lanes))
    p = fma(product(r, r), p, r) + const(1.0, lanes)
    # 2^n in two factors, so that neither leaves the normal range
    whole = let(cast(n, "int32"))
    half = let(shr(whole, 1))
    return product(p, power_of_two(half)) * power_of_two(whole - half)


def power_of_two(exponent: Expr) -> Expr:
    """2^exponent of an int32 in −126 … 127."""
    return from_bits(shl(exponent + iconst(127, lanes_of(exponent)), 23))


def sigmoid(x: Expr) -> Expr:
    """1 / (1 + e^−x)."""
    lanes = lanes_of(x)
    return const(1.0, lanes) / (const(1.0, lanes) + exp(const(0.0, lanes) - x))


def silu(x: Expr) -> Expr:
    """x / (1 + e^−x)."""
    lanes = lanes_of(x)
    x = let(x)
    return x / (const(1.0, lanes) + exp(const(0.0, lanes) - x))


def decode_e4m3(code: Expr) -> Expr:
    """f32 of e4m3 codes in the low byte of int32; the bits above are ignored."""
    return decode_e4m3_top(shl(code, 24)) * const(2.0**120, lanes_of(code))


def decode_e4m3_top(word: Expr) -> Expr:
    """f32 · 2^-120 of e4m3 codes in the top byte of int32: sign, exponent and mantissa fall into place by a shift.

    The exponent bias is 7 against 127, hence the factor; e4m3 subnormals become f32 subnormals, exactly.
    """
    return from_bits(mask(shr(word, 4), 0x87F00000))


def decode_e8m0(code: Expr) -> Expr:
    """f32 2^(code − 127) of e8m0 codes 0 … 254 in int32; code 0 is the subnormal 2^-127."""
    return from_bits(maximum(shl(code, 23), iconst(0x00400000, lanes_of(code))))


def round_e4m3(value: Expr) -> Expr:
    """An f32 within ±448 rounded to the nearest e4m3 value, halves to even, as f32."""
    value, lanes = let(value), lanes_of(value)
    word = let(bits(value))
    near = from_bits(mask(word + (mask(shr(word, 20), 1) + iconst(0x7FFFF, lanes)), 0xFFF00000))
    # below the smallest normal, 2^-6, the step is 2^-9 throughout: adding 1.5 · 2^(23 − 9) leaves exactly those bits
    shift = const(1.5 * 2.0**14, lanes)
    small = with_sign(let(rounded(value + shift)) - shift, word)
    return select(absolute(value) < const(2.0**-6, lanes), small, near)


def encode_e4m3(value: Expr) -> Expr:
    """e4m3 codes (int32, 0 … 255) of f32 values that `round_e4m3` returned."""
    value, lanes = let(value), lanes_of(value)
    word = let(bits(value))
    sign = mask(shr(word, 24), 0x80)
    normal = mask(shr(word, 20), 0x7FF) - iconst(120 << 3, lanes)
    small = cast(absolute(value) * const(2.0**9, lanes), "int32")
    return T.bitwise_or(sign, select(absolute(value) < const(2.0**-6, lanes), small, normal))


def round_e2m1(value: Expr) -> Expr:
    """An f32 within ±6 rounded to the nearest e2m1 value, halves to even, as f32."""
    value, lanes = let(value), lanes_of(value)
    size = let(absolute(value))
    two, four = size >= const(2.0, lanes), size >= const(4.0, lanes)
    step = let(select(four, const(2.0, lanes), select(two, const(1.0, lanes), const(0.5, lanes))))
    inverse = select(four, const(0.5, lanes), select(two, const(1.0, lanes), const(2.0, lanes)))
    return with_sign(nearest(size * inverse) * step, bits(value))


def encode_e2m1(value: Expr) -> Expr:
    """e2m1 codes (int32, 0 … 15) of f32 values that `round_e2m1` returned."""
    value, lanes = let(value), lanes_of(value)
    word = let(bits(value))
    sign = mask(shr(word, 28), 8)
    size = let(absolute(value))
    normal = mask(shr(word, 22), 0x1FF) - iconst(126 << 1, lanes)
    small = cast(size * const(2.0, lanes), "int32")
    return T.bitwise_or(sign, select(size < const(1.0, lanes), small, normal))


def with_sign(value: Expr, word: Expr) -> Expr:
    """`value` with the sign bit of the int32 `word`."""
    return from_bits(T.bitwise_or(mask(bits(value), 0x7FFFFFFF), mask(word, 0x80000000)))


def clamp(value: Expr, limit: float) -> Expr:
    """`value` within ±limit; NaN stays."""
    lanes = lanes_of(value)
    value = let(minimum(const(limit, lanes), let(value)))
    return maximum(const(-limit, lanes), value)


def scale_exponent(largest: Expr, limit: float) -> Expr:
    """int32 ceil(log2(largest / limit)), from the bits of the f32 `largest` > 0.

    The exponents differ by that much, plus one where the mantissa of `largest` exceeds that of the limit.
    """
    lanes = lanes_of(largest)
    word = let(bits(largest))
    bound = struct.unpack("<i", struct.pack("<f", limit))[0]
    above = mask(word, 0x7FFFFF) > iconst(bound & 0x7FFFFF, lanes)
    return shr(word, 23) - iconst(bound >> 23, lanes) + select(above, iconst(1, lanes), iconst(0, lanes))


def normal_below(x: Expr) -> Expr:
    """Φ(x), the share of a standard normal distribution that lies below x: to 1e-5 of it for x > −9."""
    lanes = lanes_of(x)
    x = let(x)
    z = let(absolute(x) * const(0.5**0.5, lanes))
    t = let(const(1.0, lanes) / (const(1.0, lanes) + z * const(0.5, lanes)))
    p = const(_ERFC[0], lanes)
    for coefficient in _ERFC[1:]:
        p = let(fma(p, t, const(coefficient, lanes)))
    tail = let(product(t, exp(p - product(z, z))) * const(0.5, lanes))
    return select(x < const(0.0, lanes), tail, const(1.0, lanes) - tail)
