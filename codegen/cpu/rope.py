"""Rotary position embedding, eight adjacent pairs to a vector; the same bits as separate products and a sum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tvm.script.ir_builder import tirx as T

from v41c.codegen.cpu.frame import Body, bound_of, build_kernel
from v41c.codegen.cpu.sparse import Types, required
from v41c.codegen.cpu.tir import (
    LANES,
    Buffer,
    Expr,
    constants,
    copy_run,
    let,
    load,
    loop,
    parallel,
    product,
    shuffle,
    store,
)
from v41c.codegen.kernel import CpuKernel
from v41c.ir.ops.rope import Rope
from v41c.ir.types import TensorType

if TYPE_CHECKING:
    from v41c.targets.target import CpuTarget


def kernel(
    op: Rope, operands: Types, results: tuple[TensorType, ...], target: CpuTarget, bounds: Mapping[str, int]
) -> CpuKernel:
    """The kernel."""
    x, cos = required(operands, 0, 1)
    heads = int(x.shape[1]) if len(x.shape) == 3 else 1
    width, pairs = int(x.shape[-1]), int(cos.shape[1])

    def emit(body: Body) -> None:
        (source, cosines, sines), (out,) = body.operands, body.results
        work = bound_of(x.shape[0], bounds) * heads * width // 4
        with parallel(body.size(x.shape[0]) * heads, work) as row:
            start, angle = let(row * width), let(row // heads * pairs)
            copy_run(source, start, out, start, width - 2 * pairs)
            rotate(source, out, let(start + width - 2 * pairs), (cosines, sines), angle, pairs, op.inverse)

    return build_kernel(emit, op, operands, results, bounds)


def rotate(
    source: Buffer, out: Buffer, start: Expr, tables: tuple[Buffer, Buffer], angle: Expr, pairs: int, inverse: bool
) -> None:
    """Rotate `pairs` pairs of source[start …] into out[start …], which may be the same; tables are cosines, sines."""
    # the sine's sign for the first and the second of a pair
    signs = (1.0, -1.0) if inverse else (-1.0, 1.0)
    with loop(pairs // 8) as block:
        place = let(start + block * LANES)
        values = let(load(source, place))
        swapped = shuffle([values], [lane ^ 1 for lane in range(LANES)])
        both = [let(load(table, angle + block * 8, 8)) for table in tables]
        c, s = (shuffle([table], [lane // 2 for lane in range(LANES)]) for table in both)
        store(out, place, product(values, c) + product(swapped, s * constants(signs * 8)))
    with loop(pairs % 8) as rest:
        pair = let(rest + pairs // 8 * 8)
        cosine, sine = (table[angle + pair] for table in tables)
        _rotate(source, out, let(start + 2 * pair), cosine, sine, signs)


def _rotate(source: Buffer, out: Buffer, place: Expr, cos: Expr, sin: Expr, signs: tuple[float, float]) -> None:
    a, b, c, s = let(load(source, place, 1)), let(load(source, place + 1, 1)), let(cos), let(sin)
    store(out, place, product(a, c) + product(b, s * T.float32(signs[0])))
    store(out, place + 1, product(b, c) + product(a, s * T.float32(signs[1])))
