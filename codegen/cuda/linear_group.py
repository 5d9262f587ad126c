"""Several projections of one input in one launch: few rows of one weight leave multiprocessors to the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import triton.language as tl

from v41c.codegen.cuda.frame import Arguments, Buffer, Frame
from v41c.codegen.cuda.kernel import Constant, CudaKernel
from v41c.codegen.cuda.language import jit
from v41c.codegen.cuda.product import constants, product_block, shared_sums, tiling
from v41c.ir.op import Op
from v41c.ir.ops.linear_group import MOST
from v41c.ir.types import DType, TensorType
from v41c.targets.cuda import CudaTarget


def kernel(
    op: Op,
    operands: Sequence[TensorType | None],
    results: Sequence[TensorType],
    target: CudaTarget,
    bounds: Mapping[str, int],
) -> CudaKernel:
    """x [T, K] and weights [M_i, K] to y_i [T, M_i]: a launch for the weights of each type."""
    frame = Frame(op, operands, results, bounds)
    kinds = [frame.type_of(_name("weight", index)).dtype for index in range(len(results))]
    for kind in dict.fromkeys(kinds):
        _launch(frame, target, [index for index, other in enumerate(kinds) if other == kind])
    return frame.kernel()


def _name(name: str, index: int) -> str:
    """The name of an operand of the weight of this index, as the operation spells it."""
    return f"{name}_{index + 1}" if index else name


def _launch(frame: Frame, target: CudaTarget, members: Sequence[int]) -> None:
    tokens = frame.type_of("x").shape[0]
    weights = [frame.type_of(_name("weight", index)) for index in members]
    rows, columns = tuple(int(weight.shape[0]) for weight in weights), int(weights[0].shape[1])
    packed = frame.type_of("x").dtype == DType.U8
    tile = tiling(weights[0].dtype, rows, columns, frame.bound(tokens), target, packed=packed)
    arguments: Arguments = {"x": frame.operand("x")}
    arguments |= constants(frame, tile, columns, tokens)
    blocks = 0
    for place in range(MOST):
        own: tuple[Buffer | Constant, ...] = (None,) * 7
        if place < len(members):
            weight, scale = (frame.operand(_name(name, members[place])) for name in ("weight", "scale"))
            shared = shared_sums(frame, tile, rows[place], tokens)
            own = (weight, scale, frame.result(members[place]), *shared, rows[place], blocks)
            blocks += tile.tiles(rows[place]) * tile.splits
        names = ("weight", "scale", "y", "partials", "counters", "M", "FIRST")
        arguments |= {_name(name, place): value for name, value in zip(names, own, strict=True)}
    del arguments["FIRST"]
    grid = (blocks, frame.tiles(tokens, tile.t))
    frame.launch(group_block, arguments, grid, warps=tile.warps, stages=tile.stages)


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
    FIRST_2: tl.constexpr,
    FIRST_3: tl.constexpr,
    FIRST_4: tl.constexpr,
    K: tl.constexpr,
    SPLITS: tl.constexpr,
    BM: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    SCALED: tl.constexpr,
) -> None:
    """A block of one of the results, whose weight's blocks begin at its FIRST.

    What differs between the weights is chosen here, so that they share one loop and its pipeline's memory.
    """
    block = tl.program_id(0)
    first = _chosen(block, FIRST_2, FIRST_3, FIRST_4, 0, FIRST_2, FIRST_3, FIRST_4)
    rows = _chosen(block, FIRST_2, FIRST_3, FIRST_4, M, M_2, M_3, M_4)
    product_block(
        x,
        _chosen(block, FIRST_2, FIRST_3, FIRST_4, weight, weight_2, weight_3, weight_4),
        _chosen(block, FIRST_2, FIRST_3, FIRST_4, scale, scale_2, scale_3, scale_4),
        _chosen(block, FIRST_2, FIRST_3, FIRST_4, y, y_2, y_3, y_4),
        _chosen(block, FIRST_2, FIRST_3, FIRST_4, partials, partials_2, partials_3, partials_4),
        _chosen(block, FIRST_2, FIRST_3, FIRST_4, counters, counters_2, counters_3, counters_4),
        T,
        block - first,
        tl.program_id(1),
        rows,
        K,
        1,
        SPLITS,
        BM,
        BT,
        BK,
        STAGES,
        SCALED,
        1,
        None,
    )


@jit
def _chosen(
    block: tl.tensor,
    FIRST_2: tl.constexpr,
    FIRST_3: tl.constexpr,
    FIRST_4: tl.constexpr,
    one: tl.tensor,
    two: tl.tensor,
    three: tl.tensor,
    four: tl.tensor,
) -> tl.tensor:
    """What belongs to the weight that a block is of; None where the weights have no such thing."""
    found = one
    if two is not None:
        found = tl.where(block < FIRST_2, found, two)
    if three is not None:
        found = tl.where(block < FIRST_3, found, three)
    if four is not None:
        found = tl.where(block < FIRST_4, found, four)
    return found
