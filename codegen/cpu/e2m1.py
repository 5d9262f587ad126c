"""Decoding of e2m1 codes by looking them up: in a register of f32 values, or of the bytes of these."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from tvm.script.ir_builder import tirx as T

from v41c.codegen.cpu import tir
from v41c.codegen.cpu.tir import LANES, Expr

if TYPE_CHECKING:
    from v41c.targets.target import CpuTarget

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = (*_MAGNITUDES, *(-value for value in _MAGNITUDES))


def decode(codes: Expr, target: CpuTarget) -> Expr:
    """16 f32 lanes of e2m1 codes in the low four bits of int32 lanes; the bits above are ignored."""
    if target.has_avx512:
        table = tir.constants(_VALUES)
        return T.call_llvm_pure_intrin("float32x16", "llvm.x86.avx512.permvar.sf.512", table, codes)
    codes = tir.let(codes)
    halves = [
        T.call_llvm_pure_intrin(
            "float32x8",
            "llvm.x86.avx2.permps",
            tir.constants(_MAGNITUDES),
            tir.shuffle([codes], range(begin, begin + 8)),
        )
        for begin in (0, 8)
    ]
    sign = tir.mask(tir.shl(codes, 28), 0x80000000)
    return tir.from_bits(T.bitwise_xor(tir.bits(tir.shuffle(halves, range(LANES))), sign))


def by_bytes(target: CpuTarget) -> bool:
    """Whether `decode_words` shuffles bytes, for which weights lie as `nibblesS` (`layouts`)."""
    return not target.has_avx512


def decode_words(words: Expr, target: CpuTarget) -> list[Expr]:
    """f32 of the four k of 16 outputs: uint16 lanes as the target's weights have them."""
    if not by_bytes(target):
        words = tir.let(tir.cast(words, "int32"))
        return [decode(tir.shr(words, 4 * k), target) for k in range(4)]
    columns = []
    for codes in (words, tir.shr(words, 4)):
        index = tir.let(tir.mask(T.reinterpret("int8x32", codes), 0x0F))
        # an f32 of one of these values is its upper two bytes: looked up, then interleaved, then put above zeros
        high, low = (tir.let(_look_up(index, shift)) for shift in (24, 16))
        for k in range(2):
            halves = tir.let(T.reinterpret("int16x16", _interleave([low, high], 16, 8 * k, 8)))
            zero = tir.let(tir.iconst(0, 16, "int16"))
            ends = [tir.let(_interleave([zero, halves], 8, 4 * end, 4)) for end in range(2)]
            columns.append(tir.let(T.reinterpret("float32x16", tir.shuffle(ends, range(32)))))
    return columns


def _look_up(index: Expr, shift: int) -> Expr:
    """The byte `shift` bits up in the f32 that each of 32 codes stands for."""
    values = (np.array(_VALUES * 2, np.float32).view(np.int32) >> shift).astype(np.int8)
    return T.call_llvm_pure_intrin("int8x32", "llvm.x86.avx2.pshuf.b", tir.integers(values.tolist(), "int8"), index)


def _interleave(sides: list[Expr], half: int, first: int, count: int) -> Expr:
    """`count` lanes of both sides in turn, from `first` on in each half of 128 bits: an unpack instruction."""
    places = [part * half + first + i for part in (0, 1) for i in range(count)]
    return tir.shuffle(sides, [side * 2 * half + place for place in places for side in (0, 1)])
