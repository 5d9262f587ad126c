"""Number formats in ONNX operators, bit for bit as in `v41c.ir.formats`.

There is no operator that takes a float apart. Instead: bytes are decoded by tables; scales that are powers of two come
from a cast to e8m0, which is exact; and the bytes of e4m3 and e8m0 values come from their logarithm, rounded where it
is a whole number anyway.
"""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np

from v41c.codegen.onnx.body import E8M0, ELEMENT, F8E4M3, U8, Array, Body, Term
from v41c.ir import packed
from v41c.ir.formats import E2M1, FORMATS, Format
from v41c.ir.types import DType


def round_trip(f: Body, x: Term, format: str) -> Term:
    """x [..., K] quantised to the format and back: f32 [..., K]"""
    rule = FORMATS[format]
    groups = f.split_last(x.wide, rule.group)
    scale = _scales(f, groups, rule)
    return f.join_last(_round_elements(f, groups / scale, rule) * scale)


def pack(f: Body, x: Term, format: str) -> Term:
    """x [..., K] as packed rows: u8 [..., elements then scales]"""
    rule = FORMATS[format]
    groups = f.split_last(x.wide, rule.group)
    scale = _scales(f, groups, rule)
    values = f.join_last(groups / scale)
    if rule.element_bits == 8:
        elements = _e4m3_bytes(f, values)
    else:
        pairs = f.split_last(_e2m1_codes(f, values), 2)
        elements = f.ReduceSum(pairs * np.array([1, 16], np.float32), [-1], keepdims=0)
    codes = _log2(f, scale) + 127.0 if rule.power_of_two else _e4m3_bytes(f, scale)
    return f.Concat(elements.to(U8), f.Squeeze(codes, [-1]).to(U8), axis=-1)


def unpack(f: Body, rows: Term, format: str, width: int) -> Term:
    """Packed rows u8 [..., elements then scales] as f32 [..., K]"""
    rule = FORMATS[format]
    elements, codes = f.many("Split", 2, rows, [width * rule.element_bits // 8, width // rule.group], axis=-1)
    values = f.Gather(_E4M3 if rule.element_bits == 8 else _PAIRS, elements.wide)
    scale = f.Gather(_E8M0 if rule.power_of_two else _E4M3, codes.wide)
    return _scaled(f, values, scale, rule.group)


def read_rows(f: Body, cache: Term, format: str, width: int) -> Term:
    """f32 [..., width] of cache rows: packed if u8, plain if f32."""
    return f.call(unpack, cache, format=format, width=width) if cache.dtype == U8 else cache


def write_rows(f: Body, x: Term, format: str, cache: Term) -> Term:
    """x [..., width] as the cache stores it: packed if the cache is u8, plain if f32."""
    return f.call(pack, x, format=format) if cache.dtype == U8 else x.wide


def row_values(f: Body, x: Term) -> Term:
    """Activations [T, K]: as they are, or of packed rows bf16."""
    if x.dtype != U8:
        return x
    return f.call(unpack, x, format=packed.FORMAT, width=packed.width(int(x.shape[1]))).to(ELEMENT[DType.BF16])


def weight_values(f: Body, weight: Term, scale: Term | None) -> Term:
    """A stored weight [..., M, K] at its exact value, f32, from its elements and scales."""
    return weight.wide if scale is None else f.call(dequantize, weight.passable, scale.passable)


def dequantize(f: Body, weight: Term, scale: Term) -> Term:
    """weight [..., M, K] times its scales: f32"""
    if weight.dtype == U8:
        return _scaled(f, f.Gather(_PAIRS, weight.wide), scale, 32)
    rows, columns = (f.arange(count) // 32 for count in f.many("Split", 2, f.Shape(weight, start=-2), [1, 1], axis=0))
    return weight * f.Gather(f.Gather(scale, rows, axis=-2), columns, axis=-1)


def _scaled(f: Body, values: Term, scale: Term, group: int) -> Term:
    """Every `group` values times their scale [..., groups]; a pair of values may be an axis of its own."""
    groups = f.Reshape(values, f.Concat(f.Shape(scale), [group], axis=0))
    return f.join_last(groups * f.Unsqueeze(scale, [-1]))


def _scales(f: Body, groups: Term, rule: Format) -> Term:
    """Scales f32 [..., 1] of groups f32 [..., group]."""
    quotient = f.Max(f.ReduceMax(f.Abs(groups), [-1], keepdims=1), rule.floor) / rule.largest
    if not rule.power_of_two:
        return f.Min(quotient, 448.0).to(F8E4M3).wide
    # `largest` is m · 2^e with 1 < m < 2, so the quotient of the next maximum above a power of two times `largest`
    # lies more than half a step above that power: the division rounds it up, never down to the power itself
    return f.Cast(quotient, to=E8M0, round_mode="up").wide


def _round_elements(f: Body, values: Term, rule: Format) -> Term:
    if rule.element_bits == 8:
        return f.Clip(values, -448.0, 448.0).to(F8E4M3).wide
    clamped = f.Clip(values, -6.0, 6.0)
    step, _ = _e2m1_steps(f, f.Abs(clamped))
    return f.Round(clamped / step) * step


def _e2m1_codes(f: Body, values: Term) -> Term:
    """Codes 0…15 as f32."""
    magnitude = f.Min(f.Abs(values), 6.0)
    step, offset = _e2m1_steps(f, magnitude)
    return f.Round(magnitude / step) + offset + _sign(f, values, 8.0)


def _e2m1_steps(f: Body, magnitude: Term) -> tuple[Term, Term]:
    """Distance of the e2m1 values around a magnitude, and the code of 0 if they went on like this to 0."""
    fine, middle = magnitude < 2.0, magnitude < 4.0
    return f.Where(fine, 0.5, f.Where(middle, 1.0, 2.0)), f.Where(fine, 0.0, f.Where(middle, 2.0, 4.0))


def _e4m3_bytes(f: Body, values: Term) -> Term:
    """Bytes 0…255 as f32 of values rounded to e4m3."""
    rounded = f.Clip(values, -448.0, 448.0).to(F8E4M3).wide
    magnitude = f.Abs(rounded)
    power = f.Cast(f.Max(magnitude, 2.0**-6), to=E8M0, round_mode="down").wide
    # 8 · (exponent field − 1) + 8 · (1.mantissa), and below 2^-6, where values are multiples of 2^-9, 8 · (0.mantissa)
    return (_log2(f, power) + 6.0 + magnitude / power) * 8.0 + _sign(f, rounded, 128.0)


def _log2(f: Body, power: Term) -> Term:
    """The exponent, as f32, of powers of two."""
    return f.Round(f.Log(power) * (1 / math.log(2)))


def _sign(f: Body, values: Term, code: float) -> Term:
    return f.Where(f.sign_bit(values), code, 0.0)


_BYTES = np.arange(256, dtype=np.uint8)
_E4M3: Array = _BYTES.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
_E8M0: Array = _BYTES.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
_ELEMENTS = np.array([*E2M1, *(-value for value in E2M1)], np.float32)
#: the two elements of a byte
_PAIRS: Array = np.stack((_ELEMENTS[_BYTES & 15], _ELEMENTS[_BYTES >> 4]), -1)
