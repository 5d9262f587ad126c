"""Quantisation of a group of values to a format and back, in registers (`ir.formats`)."""

from __future__ import annotations

from collections.abc import Sequence

from v41c.codegen.cpu.numeric import clamp, power_of_two, round_e2m1, round_e4m3, scale_exponent
from v41c.codegen.cpu.tir import (
    LANES,
    Buffer,
    Expr,
    absolute,
    const,
    join_lanes,
    let,
    load,
    loop,
    maximum,
    minimum,
    product,
    splat,
    store,
)
from v41c.ir.formats import Format


def round_trip(values: Sequence[Expr], format: Format) -> list[Expr]:
    """The vectors of one group, each divided by the group's scale, rounded to the element type and multiplied again."""
    values = [let(value) for value in values]
    largest = let(absolute(values[0]))
    for value in values[1:]:
        largest = let(maximum(largest, let(absolute(value))))
    amax = let(maximum(const(format.floor), let(join_lanes(largest, maximum))))
    rounded = round_e4m3 if format.element_bits == 8 else round_e2m1
    if format.power_of_two:
        exponent = let(scale_exponent(amax, format.largest))
        scale = let(splat(let(power_of_two(exponent)), LANES))
        # the division by a power of two, exactly
        inverse = let(splat(let(power_of_two(-exponent)), LANES))
        return [product(rounded(clamp(value * inverse, format.largest)), scale) for value in values]
    ratio = let(amax / const(format.largest))
    scale = let(splat(let(round_e4m3(let(minimum(const(448.0), ratio)))), LANES))
    return [product(rounded(clamp(value / scale, format.largest)), scale) for value in values]


def round_trip_run(source: Buffer, out: Buffer, start: Expr, width: int, format: Format) -> None:
    """out[start …] = the round trip of source[start …], group by group; both may be the same buffer."""
    with loop(width // format.group) as group:
        first = let(start + group * format.group)
        places = [let(first + part) for part in range(0, format.group, LANES)]
        values = round_trip([load(source, place) for place in places], format)
        for place, value in zip(places, values, strict=True):
            store(out, place, value)
