"""Number formats in Triton, as `v41c.ir.formats` says: unpacking, scales by their bits, rounding and back."""

from __future__ import annotations

import triton.language as tl

from v41c.codegen.cuda.language import jit


@jit
def sigmoid(x: tl.tensor) -> tl.tensor:
    """1 / (1 + e^-x), with no exponential of a large number."""
    small = tl.math.exp(-tl.abs(x))
    return tl.where(x < 0.0, small, 1.0) / (1.0 + small)


@jit
def decode_e8m0(codes: tl.tensor) -> tl.tensor:
    """f32 values 2^(code − 127) of u8 codes."""
    exponents = codes.to(tl.int32)
    return tl.where(exponents == 0, 0x00400000, exponents << 23).to(tl.float32, bitcast=True)


@jit
def decode_e4m3(codes: tl.tensor) -> tl.tensor:
    """f32 values of u8 codes."""
    return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@jit
def decode_e2m1(codes: tl.tensor) -> tl.tensor:
    """f32 values of i32 codes 0…15: exponent and mantissa of a float from 1 on, half the code below."""
    magnitude = codes & 7
    above = (((magnitude >> 1) + 126) << 23) | ((magnitude & 1) << 22)
    value = tl.where(magnitude > 1, above.to(tl.float32, bitcast=True), magnitude.to(tl.float32) * 0.5)
    return tl.where(codes > 7, -value, value)


@jit
def unpack_nibbles(packed: tl.tensor) -> tl.tensor:
    """i32 codes [..., 2·B] of u8 bytes [..., B]; the even index is the low nibble."""
    wide = packed.to(tl.int32)
    return tl.interleave(wide & 15, wide >> 4)


@jit
def encode_e2m1(values: tl.tensor) -> tl.tensor:
    """i32 codes 0…15 of f32 values, clamped to ±6 and rounded to nearest even."""
    magnitude = tl.abs(values)
    code = (magnitude > 0.25).to(tl.int32) + (magnitude >= 0.75).to(tl.int32) + (magnitude > 1.25).to(tl.int32)
    code += (magnitude >= 1.75).to(tl.int32) + (magnitude > 2.5).to(tl.int32) + (magnitude >= 3.5).to(tl.int32)
    code += (magnitude > 5.0).to(tl.int32)
    return code | ((values.to(tl.int32, bitcast=True) >> 28) & 8)


@jit
def power_of_two_scale(amax: tl.tensor, LARGEST: tl.constexpr, FLOOR: tl.constexpr) -> tl.tensor:
    """i32 codes of the least power of two s with max(amax, FLOOR) / s ≤ LARGEST, read from the bits of amax."""
    bits = tl.maximum(amax, FLOOR).to(tl.int32, bitcast=True)
    # LARGEST is 448 = 1.75 · 2^8 or 6 = 1.5 · 2^2
    exponent: tl.constexpr = 8 if LARGEST == 448.0 else 2
    mantissa: tl.constexpr = 0x600000 if LARGEST == 448.0 else 0x400000
    return (bits >> 23) - exponent + ((bits & 0x7FFFFF) > mantissa).to(tl.int32)


@jit
def quantize_groups(groups: tl.tensor, FORMAT: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Codes i32 [..., G] and scale codes i32 [...] of f32 groups [..., G] in a format of `v41c.ir.formats`."""
    amax = tl.max(tl.abs(groups), axis=-1)
    if FORMAT == "fp8_e8m0_32":
        scale_codes = power_of_two_scale(amax, 448.0, 1e-4)
        scale = decode_e8m0(scale_codes)
    elif FORMAT == "fp4_e8m0_32":
        scale_codes = power_of_two_scale(amax, 6.0, 6.0 * 2.0**-126)
        scale = decode_e8m0(scale_codes)
    else:
        rounded = tl.minimum(tl.math.div_rn(tl.maximum(amax, 6.0 * 2.0**-9), 6.0), 448.0).to(tl.float8e4nv)
        scale_codes = rounded.to(tl.uint8, bitcast=True).to(tl.int32)
        scale = rounded.to(tl.float32)
    values = tl.math.div_rn(groups, tl.expand_dims(scale, -1))
    if FORMAT == "fp8_e8m0_32":
        codes = values.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32)
    else:
        codes = encode_e2m1(values)
    return codes, scale_codes


@jit
def round_groups(groups: tl.tensor, FORMAT: tl.constexpr) -> tl.tensor:
    """f32 groups [..., G] rounded to a format and back."""
    codes, scale_codes = quantize_groups(groups, FORMAT)
    values = decode_e4m3(codes.to(tl.uint8)) if FORMAT == "fp8_e8m0_32" else decode_e2m1(codes)
    scale = decode_e4m3(scale_codes.to(tl.uint8)) if FORMAT == "fp4_e4m3_16" else decode_e8m0(scale_codes)
    return values * tl.expand_dims(scale, -1)


@jit
def normal_below(x: tl.tensor) -> tl.tensor:
    """The share of a standard normal distribution that lies below x: to 1e-5 of it for x > −9.

    erfc(z) = t · exp(polynomial of t − z²), t = 1 / (1 + z / 2), within 1.2e-7 of it for z ≥ 0 (Chebyshev; Press et
    al., "Numerical Recipes", section 6.2).
    """
    z = tl.abs(x) * 0.7071067811865476
    t = 1.0 / (1.0 + 0.5 * z)
    p = ((0.17087277 * t - 0.82215223) * t + 1.48851587) * t - 1.13520398
    p = (((p * t + 0.27886807) * t - 0.18628806) * t + 0.09678418) * t + 0.37409196
    p = (p * t + 1.00002368) * t - 1.26551223
    tail = 0.5 * t * tl.exp(p - z * z)
    return tl.where(x < 0.0, tail, 1.0 - tail)
