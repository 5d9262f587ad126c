"""Writing of rows into caches, packed or plain."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from tvm.script.ir_builder import tirx as T

from v41c.codegen.cpu.numeric import (
    clamp,
    encode_e2m1,
    encode_e4m3,
    power_of_two,
    round_e2m1,
    round_e4m3,
    scale_exponent,
)
from v41c.codegen.cpu.tir import (
    LANES,
    Buffer,
    Expr,
    absolute,
    cast,
    const,
    each,
    join_lanes,
    let,
    load,
    loop,
    maximum,
    minimum,
    parallel,
    put,
    shuffle,
    when,
)
from v41c.ir import formats
from v41c.ir.types import DType, TensorType

_PACK_WORK = 8  # multiply-adds that packing an element is worth


def write_rows(
    cache: Buffer,
    kind: TensorType,
    name: str,
    x: Buffer,
    width: int,
    tokens: Expr,
    most_tokens: int,
    row_of: Callable[[Expr], Expr],
    writes: Callable[[Expr], Expr] | None = None,
) -> None:
    """cache row `row_of(token)` = x[token] for the tokens where `writes(token)` holds, later ones over earlier ones.

    Threads share out the columns and each takes the tokens in order, so that equal rows need no care.
    """
    chosen = writes or (lambda _: None)
    if kind.dtype != DType.U8:
        with loop(tokens) as token, _if(chosen(token)):
            start = let(row_of(token) * width)
            each(width, lambda i, lanes: put(cache, start + i, load(x, token * width + i, lanes)))
        return
    format = formats.FORMATS[name]
    pack = {"fp8_e8m0_32": _pack_fp8, "fp4_e8m0_32": _pack_fp4, "fp4_e4m3_16": _pack_fp4_fine}[name]
    work = most_tokens * width * _PACK_WORK
    with parallel(width // format.group, work) as group, loop(tokens) as token, _if(chosen(token)):
        start = let(row_of(token) * format.row_bytes(width))
        source = let(token * width + group * format.group)
        values = [let(load(x, source + i)) for i in range(0, format.group, LANES)]
        codes = let(start + group * (format.group * format.element_bits // 8))
        put(cache, start + (width * format.element_bits // 8) + group, pack(values, format, cache, codes))


def _if(condition: Expr | None) -> AbstractContextManager[None]:
    return nullcontext() if condition is None else when(condition)


def _largest(values: list[Expr], format: formats.Format) -> Expr:
    sizes = [absolute(value) for value in values]
    largest = sizes[0] if len(sizes) == 1 else maximum(let(sizes[0]), let(sizes[1]))
    return let(maximum(const(format.floor), let(join_lanes(largest, maximum))))


def _pack_fp8(values: list[Expr], format: formats.Format, cache: Buffer, start: Expr) -> Expr:
    exponent = let(scale_exponent(_largest(values, format), format.largest))
    inverse = let(T.broadcast(power_of_two(T.int32(0) - exponent), LANES))
    for part, value in enumerate(values):
        codes = encode_e4m3(round_e4m3(clamp(value * inverse, format.largest)))
        put(cache, start + part * LANES, cast(codes, "uint8"))
    return cast(exponent + 127, "uint8")


def _pack_fp4(values: list[Expr], format: formats.Format, cache: Buffer, start: Expr) -> Expr:
    exponent = let(scale_exponent(_largest(values, format), format.largest))
    inverse = let(T.broadcast(power_of_two(T.int32(0) - exponent), LANES))
    for part, value in enumerate(values):
        _put_nibbles(cache, start + part * (LANES // 2), value * inverse, format)
    return cast(exponent + 127, "uint8")


def _pack_fp4_fine(values: list[Expr], format: formats.Format, cache: Buffer, start: Expr) -> Expr:
    ratio = let(_largest(values, format) / const(format.largest))
    scale = let(round_e4m3(let(minimum(const(448.0), ratio))))
    _put_nibbles(cache, start, values[0] / T.broadcast(scale, LANES), format)
    return cast(encode_e4m3(scale), "uint8")


def _put_nibbles(cache: Buffer, start: Expr, values: Expr, format: formats.Format) -> None:
    codes = let(encode_e2m1(round_e2m1(clamp(values, format.largest))))
    low, high = shuffle([codes], range(0, LANES, 2)), shuffle([codes], range(1, LANES, 2))
    put(cache, start, cast(T.bitwise_or(low, T.shift_left(high, T.broadcast(T.int32(4), LANES // 2))), "uint8"))
