"""Several projections of one input in one launch: few rows of one weight leave multiprocessors to the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import triton.language as tl

from v41c.codegen.cuda.frame import Buffer, Extent, Frame
from v41c.codegen.cuda.kernel import Constant, CudaKernel
from v41c.codegen.cuda.language import jit
from v41c.codegen.cuda.product import constants, product_block, shared_sums, tiling
from v41c.ir.op import Op
from v41c.ir.ops.linear_group import MOST
from v41c.ir.types import TensorType
from v41c.targets.cuda import CudaTarget


def kernel(
    op: Op,
    operands: Sequence[TensorType | None],
    results: Sequence[TensorType],
    target: CudaTarget,
    bounds: Mapping[str, int],
) -> CudaKernel:
    """x [T, K] and weights [M_i, K] to y_i [T, M_i]."""
    frame = Frame(op, operands, results, bounds)
    tokens, columns = frame.type_of("x").shape[0], int(frame.type_of("x").shape[1])
    rows = tuple(int(result.shape[1]) for result in results)
    tile = tiling(frame.type_of("weight").dtype, rows, columns, frame.bound(tokens), target)
    arguments: dict[str, Buffer | Extent | Constant] = {"x": frame.operand("x")}
    arguments |= constants(frame, tile, columns, tokens)
    for index in range(MOST):
        suffix = f"_{index + 1}" if index else ""
        arguments |= {f"{name}{suffix}": frame.operand(f"{name}{suffix}") for name in ("weight", "scale")}
        present = index < len(rows)
        partials, counters = shared_sums(frame, tile, rows[index], tokens) if present else (None, None)
        arguments |= {f"partials{suffix}": partials, f"counters{suffix}": counters}
        arguments |= {f"y{suffix}": frame.result(index) if present else None}
        arguments |= {f"M{suffix}": rows[index] if present else 0}
    blocks = sum(tile.tiles(count) for count in rows) * tile.splits
    grid = (blocks, frame.tiles(tokens, tile.t))
    frame.launch(group_block, arguments, grid, warps=tile.warps, stages=tile.stages)
    return frame.kernel()


@jit
def group_block(
    x: tl.tensor,
    weight: tl.tensor,
    weight_2: tl.tensor,
    weight_3: tl.tensor,
    weight_4: tl.tensor,
    scale: tl.tensor,
    scale_2: tl.tensor,
    scale_3: tl.tensor,
    scale_4: tl.tensor,
    y: tl.tensor,
    y_2: tl.tensor,
    y_3: tl.tensor,
    y_4: tl.tensor,
    partials: tl.tensor,
    partials_2: tl.tensor,
    partials_3: tl.tensor,
    partials_4: tl.tensor,
    counters: tl.tensor,
    counters_2: tl.tensor,
    counters_3: tl.tensor,
    counters_4: tl.tensor,
    T: tl.tensor,
    M: tl.constexpr,
    M_2: tl.constexpr,
    M_3: tl.constexpr,
    M_4: tl.constexpr,
    K: tl.constexpr,
    SPLITS: tl.constexpr,
    BM: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """A block of one of the results; the first weight's blocks come first."""
    block = tl.program_id(0)
    SECOND: tl.constexpr = (M + BM - 1) // BM * SPLITS
    THIRD: tl.constexpr = SECOND + (M_2 + BM - 1) // BM * SPLITS
    FOURTH: tl.constexpr = THIRD + (M_3 + BM - 1) // BM * SPLITS
    if block < SECOND:
        _block(x, weight, scale, y, partials, counters, T, block, M, K, SPLITS, BM, BT, BK, STAGES)
    elif block < THIRD:
        block -= SECOND
        _block(x, weight_2, scale_2, y_2, partials_2, counters_2, T, block, M_2, K, SPLITS, BM, BT, BK, STAGES)
    elif block < FOURTH:
        if weight_3 is not None:
            block -= THIRD
            _block(x, weight_3, scale_3, y_3, partials_3, counters_3, T, block, M_3, K, SPLITS, BM, BT, BK, STAGES)
    else:
        if weight_4 is not None:
            block -= FOURTH
            _block(x, weight_4, scale_4, y_4, partials_4, counters_4, T, block, M_4, K, SPLITS, BM, BT, BK, STAGES)


@jit
def _block(
    x: tl.tensor,
    weight: tl.tensor,
    scale: tl.tensor,
    y: tl.tensor,
    partials: tl.tensor,
    counters: tl.tensor,
    T: tl.tensor,
    block: tl.tensor,
    M: tl.constexpr,
    K: tl.constexpr,
    SPLITS: tl.constexpr,
    BM: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    t_block = tl.program_id(1)
    product_block(
        x, weight, scale, y, partials, counters, T, block, t_block, M, K, 1, SPLITS, BM, BT, BK, STAGES, 1, None
    )
