"""Products of activations with stored weights: one tile of output, whatever the weight is stored as.

A tile's sum runs over k in the same steps for every row, so that a token's result does not depend on its neighbours.
Weights are dequantised to what the tensor cores multiply: e4m3 times a power of two is exact in bf16, and so are
activations after their round trip, so products are exact and sums are f32. Hopper's fp8 products would save half of the
tensor cores' time, and spend it again on the vector units: with scales of 32 elements on both sides, every accumulator
has to be scaled and added once per instruction.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton.language as tl

from v41c.codegen.cuda.language import jit
from v41c.codegen.cuda.numeric import decode_e8m0
from v41c.ir.types import DType, TensorType


@dataclass(frozen=True)
class Tiling:
    """A tile of output rows M (of the weight) by tokens T, over steps of K; threads in warps."""

    m: int
    t: int
    k: int
    warps: int
    stages: int


def tiling(weight: TensorType, tokens: int) -> Tiling:
    """The tile for a weight [M, K] at up to `tokens` tokens.

    One token: memory-bound. 8 rows of 512 give every thread of 4 warps 16 bytes of fp8 twice, and a release product
    of 1,536 rows 192 blocks for 132 multiprocessors. Up to 16: the weight's rows fill the tensor cores' 64 and the
    tokens their 16, so that memory is still read once. More: 128 x 128 reads a byte per 128 multiplications; f32
    tiles of 64 x 64 stay in registers.
    """
    if tokens == 1:
        return Tiling(8, 1, 256 if weight.dtype == DType.F32 else 512, 4, 3)
    if tokens <= 16:
        return Tiling(64, 16, 64 if weight.dtype == DType.F32 else 128, 4, 3)
    if weight.dtype == DType.F32:
        return Tiling(32, 32, 32, 4, 2)
    return Tiling(128, 128, 64, 8, 3)


@jit
def load_weight(
    weight: tl.tensor, scale: tl.tensor, m: tl.tensor, k: tl.tensor, M: tl.constexpr, K: tl.constexpr, KS: tl.constexpr
) -> tl.tensor:
    """The weight's values [m, k]: f32 as they are, bf16 as they are, fp8 with scales of 32 x 32 as bf16.

    `k` must be 32 x KS consecutive columns, starting at a multiple of 32, for a scaled weight.
    """
    inside = (m[:, None] < M) & (k[None, :] < K)
    values = tl.load(weight + m[:, None].to(tl.int64) * K + k[None, :], mask=inside, other=0)
    if scale is not None:
        SCALES: tl.constexpr = (K + 31) // 32
        first = tl.min(k, axis=0) // 32 + tl.arange(0, KS)
        inside = (m[:, None] < M) & (first[None, :] < SCALES)
        codes = tl.load(scale + (m[:, None] // 32) * SCALES + first[None, :], mask=inside, other=0)
        numbers = tl.reshape(values.to(tl.float8e4nv, bitcast=True).to(tl.bfloat16), (m.shape[0], KS, 32))
        values = tl.reshape(numbers * decode_e8m0(codes).to(tl.bfloat16)[:, :, None], (m.shape[0], KS * 32))
    return values


@jit
def product_tile(
    x: tl.tensor,
    weight: tl.tensor,
    scale: tl.tensor,
    y: tl.tensor,
    T: tl.tensor,
    m_block: tl.tensor,
    t_block: tl.tensor,
    M: tl.constexpr,
    K: tl.constexpr,
    X_STRIDE: tl.constexpr,
    Y_STRIDE: tl.constexpr,
    BM: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
) -> None:
    """y[t, m] = Σ_k x[t, k] · weight[m, k] for a tile of BM rows of the weight and BT tokens."""
    m = m_block * BM + tl.arange(0, BM)
    if BT == 1:
        total = _row_sums(x + t_block.to(tl.int64) * X_STRIDE, weight, scale, m, M, K, BM, BK)
        tl.store(y + t_block.to(tl.int64) * Y_STRIDE + m, total.to(y.dtype.element_ty), mask=m < M)
    else:
        t = t_block * BT + tl.arange(0, BT)
        sums = _tile_sums(x, weight, scale, T, m, t, M, K, X_STRIDE, BM, BT, BK)
        place = y + t[:, None].to(tl.int64) * Y_STRIDE + m[None, :]
        tl.store(place, tl.trans(sums).to(y.dtype.element_ty), mask=(t[:, None] < T) & (m[None, :] < M))


@jit
def _row_sums(
    x: tl.tensor,
    weight: tl.tensor,
    scale: tl.tensor,
    m: tl.tensor,
    M: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
) -> tl.tensor:
    """f32 [BM] of one token, on the vector units."""
    sums = tl.zeros((BM, BK), tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        values = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)
        sums += load_weight(weight, scale, m, k, M, K, BK // 32).to(tl.float32) * values[None, :]
    return tl.sum(sums, axis=1)


@jit
def _tile_sums(
    x: tl.tensor,
    weight: tl.tensor,
    scale: tl.tensor,
    T: tl.tensor,
    m: tl.tensor,
    t: tl.tensor,
    M: tl.constexpr,
    K: tl.constexpr,
    X_STRIDE: tl.constexpr,
    BM: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
) -> tl.tensor:
    """f32 [BM, BT] on the tensor cores; the weight is their first operand, whose rows come in 64s."""
    sums = tl.zeros((BM, BT), tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        place = x + t[None, :].to(tl.int64) * X_STRIDE + k[:, None]
        values = tl.load(place, mask=(t[None, :] < T) & (k[:, None] < K), other=0.0)
        numbers = load_weight(weight, scale, m, k, M, K, BK // 32)
        if (numbers.dtype == tl.bfloat16) & (values.dtype == tl.bfloat16):
            sums = tl.dot(numbers, values, sums)
        else:
            sums = tl.dot(numbers.to(tl.float32), values.to(tl.float32), sums, input_precision="ieee")
    return sums
