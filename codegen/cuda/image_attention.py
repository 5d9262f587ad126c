"""Attention of every patch to all patches of its image: a block is a tile of patches and one head.

A tile goes through the images that its patches are of, and through the keys of each in blocks of 64 from the first on:
a patch's result does not depend on what stands beside its image. Scores, sums and the running maximum are f32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import triton.language as tl

from v41c.codegen.cuda.frame import Frame
from v41c.codegen.cuda.kernel import CudaKernel
from v41c.codegen.cuda.language import jit
from v41c.codegen.cuda.rows import power_of_two
from v41c.ir.op import Op
from v41c.ir.ops.image_attention import BLOCK
from v41c.ir.types import DType, TensorType
from v41c.targets.cuda import CudaTarget


def kernel(
    op: Op,
    operands: Sequence[TensorType | None],
    results: Sequence[TensorType],
    target: CudaTarget,
    bounds: Mapping[str, int],
) -> CudaKernel:
    """qkv [T, 3 · H, HD], begins and ends [T] to [T, H, HD]."""
    frame = Frame(op, operands, results, bounds)
    tokens, heads, width = frame.type_of("qkv").shape
    wide = frame.type_of("qkv").dtype == DType.F32
    tile = 16 if wide or frame.bound(tokens) <= 16 else 64
    frame.launch(
        image_tiles,
        {"qkv": frame.operand("qkv"), "begins": frame.operand("begins"), "ends": frame.operand("ends")}
        | {"out": frame.result(0), "T": frame.extent(tokens), "H": int(heads) // 3, "WIDTH": int(width)}
        | {"SCALE": float(op.attributes()["scale"]), "BQ": tile, "BK": BLOCK}
        | {"BD": max(16, power_of_two(int(width)))},
        (frame.tiles(tokens, tile), int(heads) // 3),
    )
    return frame.kernel()


@jit
def image_tiles(
    qkv: tl.tensor,
    begins: tl.tensor,
    ends: tl.tensor,
    out: tl.tensor,
    T: tl.tensor,
    H: tl.constexpr,
    WIDTH: tl.constexpr,
    SCALE: tl.constexpr,
    BQ: tl.constexpr,
    BK: tl.constexpr,
    BD: tl.constexpr,
) -> None:
    """BQ patches of one head."""
    head = tl.program_id(1)
    first = tl.program_id(0) * BQ
    last = tl.minimum(first + BQ, T)
    patch = first + tl.arange(0, BQ)
    column = tl.arange(0, BD)
    inside = (patch[:, None] < T) & (column[None, :] < WIDTH)
    place = (patch[:, None].to(tl.int64) * (3 * H) + head) * WIDTH + column[None, :]
    q = tl.load(qkv + place, mask=inside, other=0.0)
    keys = qkv + H * WIDTH
    values = qkv + 2 * H * WIDTH
    start = first
    while start < last:
        begin = tl.load(begins + start)
        end = tl.minimum(tl.load(ends + start), T)
        maximum = tl.full((BQ,), float("-inf"), tl.float32)
        total = tl.zeros((BQ,), tl.float32)
        sums = tl.zeros((BQ, BD), tl.float32)
        for block in range((end - begin + BK - 1) // BK):
            key = begin + block * BK + tl.arange(0, BK)
            seen = (key[:, None] < end) & (column[None, :] < WIDTH)
            source = (key[:, None].to(tl.int64) * (3 * H) + head) * WIDTH + column[None, :]
            k = tl.load(keys + source, mask=seen, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * SCALE
            scores = tl.where((key < end)[None, :], scores, float("-inf"))
            highest = tl.maximum(maximum, tl.max(scores, axis=1))
            decay = tl.exp(maximum - highest)
            weights = tl.exp(scores - highest[:, None])
            total = total * decay + tl.sum(weights, axis=1)
            v = tl.load(values + source, mask=seen, other=0.0)
            sums = tl.dot(weights.to(q.dtype), v, sums * decay[:, None], input_precision="ieee")
            maximum = highest
        stop = tl.minimum(end, last)
        kept = inside & (patch[:, None] >= start) & (patch[:, None] < stop)
        target = (patch[:, None].to(tl.int64) * H + head) * WIDTH + column[None, :]
        tl.store(
            out + target, tl.math.div_rn(sums, total[:, None] + tl.zeros_like(sums)).to(out.dtype.element_ty), mask=kept
        )
        start = stop
