"""The router: logits and choice in one launch.

Every block sums some columns of some experts' logits into the workspace. The last block of a tile of tokens adds those
sums in the order of the columns and chooses. One token: 96 blocks of 4 rows read the release's 3.9 MB. More: a router
has too few rows to fill the multiprocessors with tiles of the tensor cores, so its columns are split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import triton.language as tl

from v41c.codegen.cuda.frame import Arguments, Frame
from v41c.codegen.cuda.kernel import CudaKernel
from v41c.codegen.cuda.language import jit
from v41c.codegen.cuda.product import row_sums, tile_sums
from v41c.codegen.cuda.route import choice, choose
from v41c.ir.types import DType

if TYPE_CHECKING:
    from v41c.ir.ops.gate import Gate
    from v41c.ir.types import TensorType
    from v41c.targets.cuda import CudaTarget


@dataclass(frozen=True)
class Tile:
    """Experts, tokens and columns of a step; how many blocks share the columns; tokens chosen for at a time; warps."""

    m: int
    t: int
    k: int
    splits: int
    choose: int
    warps: int


def tile_of(weight: TensorType, tokens: int) -> Tile:
    """The tile at up to `tokens` tokens. Choosing among 512 experts for 8 tokens takes 16 lanes of 256 threads."""
    if tokens == 1:
        return Tile(4, 1, 1024, 1, 1, 4)
    columns = 32 if weight.dtype == DType.F32 else 128
    splits = max(1, min(8, int(weight.shape[1]) // 512))
    return Tile(32, 16, columns, splits, 8, 8) if tokens <= 16 else Tile(64, 32, columns, splits, 8, 8)


def kernel(
    op: Gate,
    operands: Sequence[TensorType | None],
    results: Sequence[TensorType],
    target: CudaTarget,
    bounds: Mapping[str, int],
) -> CudaKernel:
    """ids and weights [T, k] of x [T, K] and weight [E, K]."""
    frame = Frame(op, operands, results, bounds)
    weight, tokens = frame.type_of("weight"), frame.type_of("x").shape[0]
    experts, columns = (int(dim) for dim in weight.shape)
    bound, tile = frame.bound(tokens), tile_of(weight, frame.bound(tokens))
    part = -(-columns // (tile.splits * tile.k)) * tile.k
    arguments: Arguments = {"x": frame.operand("x"), "weight": frame.operand("weight"), "T": frame.extent(tokens)}
    arguments |= {"logits": frame.workspace(tile.splits * bound * experts, "fp32")}
    arguments |= {"counters": frame.counters(-(-bound // tile.t)), "K": columns, "PART": part}
    arguments |= {"BM": tile.m, "BT": tile.t, "BK": tile.k, "BC": tile.choose}
    frame.launch(
        gate_tile,
        arguments | choice(frame, op, experts),
        (-(-experts // tile.m), tile.splits, frame.tiles(tokens, tile.t)),
        warps=tile.warps,
        stages=3,
    )
    return frame.kernel()


@jit
def gate_tile(
    x: tl.tensor,
    weight: tl.tensor,
    T: tl.tensor,
    logits: tl.tensor,
    counters: tl.tensor,
    bias: tl.tensor,
    image_bias: tl.tensor,
    image: tl.tensor,
    ids: tl.tensor,
    weights: tl.tensor,
    K: tl.constexpr,
    PART: tl.constexpr,
    BM: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BC: tl.constexpr,
    EXPERTS: tl.constexpr,
    BE: tl.constexpr,
    CHOICES: tl.constexpr,
    SCORE: tl.constexpr,
    SCALE: tl.constexpr,
    TEMPERATURE: tl.constexpr,
    NORMALIZE: tl.constexpr,
) -> None:
    """logits [splits, T, EXPERTS] of a tile over PART columns; the choice for its tokens by the last block of them."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    t = tl.program_id(2) * BT + tl.arange(0, BT)
    split = tl.program_id(1)
    sums = _sums(x, weight, m, t, T, split * PART, K, PART, EXPERTS, BM, BT, BK)
    place = logits + (split * T + t[:, None]) * EXPERTS + m[None, :]
    tl.store(place, sums, mask=(t[:, None] < T) & (m[None, :] < EXPERTS))
    tl.debug_barrier()
    counter = counters + tl.program_id(2)
    done = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    if done == tl.num_programs(0) * tl.num_programs(1) - 1:
        tl.debug_barrier()
        tl.store(counter, 0)
        expert = tl.arange(0, BE)[None, :]
        for first in range(tl.program_id(2) * BT, tl.minimum(T, tl.program_id(2) * BT + BT), BC):
            chosen = first + tl.arange(0, BC)
            inside = (chosen[:, None] < T) & (expert < EXPERTS)
            total = tl.zeros((BC, BE), tl.float32)
            for part in range(tl.num_programs(1)):
                source = logits + (part * T + chosen[:, None]) * EXPERTS + expert
                total += tl.load(source, mask=inside, other=0.0, cache_modifier=".cg")
            choose(
                *(total, chosen, T, bias, image_bias, image, ids, weights),
                *(EXPERTS, BE, CHOICES, SCORE, SCALE, TEMPERATURE, NORMALIZE),
            )


@jit
def _sums(
    x: tl.tensor,
    weight: tl.tensor,
    m: tl.tensor,
    t: tl.tensor,
    T: tl.tensor,
    first: tl.tensor,
    K: tl.constexpr,
    PART: tl.constexpr,
    M: tl.constexpr,
    BM: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
) -> tl.tensor:
    """f32 [BT, BM]: Σ x[t, k] · weight[m, k] over PART columns from `first` on."""
    source = x + t.to(tl.int64) * K
    STEPS: tl.constexpr = PART // BK
    if BT == 1:
        sums = row_sums(source, weight, None, m, first, M, K, STEPS, BM, BK, 3)
    else:
        sums = tile_sums(source, weight, None, m, t < T, first, M, K, STEPS, BM, BT, BK, False)
    return tl.trans(sums)
