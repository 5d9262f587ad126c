"""A product with one stored weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import triton.language as tl

from v41c.codegen.cuda.frame import Frame
from v41c.codegen.cuda.kernel import CudaKernel
from v41c.codegen.cuda.language import jit
from v41c.codegen.cuda.product import constants, product_block, shared_sums, tiling
from v41c.ir.formats import FORMATS
from v41c.ir.op import Op
from v41c.ir.types import DType, TensorType
from v41c.targets.cuda import CudaTarget


def kernel(
    op: Op,
    operands: Sequence[TensorType | None],
    results: Sequence[TensorType],
    target: CudaTarget,
    bounds: Mapping[str, int],
) -> CudaKernel:
    """x [T, K] and weight [M, K] to y [T, M]."""
    frame = Frame(op, operands, results, bounds)
    launch_linear(frame, target, groups=1)
    return frame.kernel()


def launch_linear(frame: Frame, target: CudaTarget, groups: int, format: str | None = None) -> None:
    """Launch the product of x with a weight of `groups` groups of rows, and the round trip of y to a format."""
    weight, tokens = frame.type_of("weight"), frame.type_of("x").shape[0]
    rows, columns = int(weight.shape[0]) // groups, int(weight.shape[1])
    group = 1 if format is None else FORMATS[format].group
    packed = frame.type_of("x").dtype == DType.U8
    tile = tiling(weight.dtype, (rows,), columns, frame.bound(tokens), target, groups, least_rows=group, packed=packed)
    partials, counters = shared_sums(frame, tile, rows, tokens, groups)
    frame.launch(
        linear_block,
        {name: frame.operand(name) for name in ("x", "weight", "scale")}
        | {"y": frame.result(0), "partials": partials, "counters": counters, "M": rows, "GROUPS": groups}
        | {"GROUP": group, "FORMAT": format, **constants(frame, tile, columns, tokens)},
        (tile.tiles(rows, groups) * tile.splits, frame.tiles(tokens, tile.t)),
        warps=tile.warps,
        stages=tile.stages,
    )


@jit
def linear_block(
    x: tl.tensor,
    weight: tl.tensor,
    scale: tl.tensor,
    y: tl.tensor,
    partials: tl.tensor,
    counters: tl.tensor,
    T: tl.tensor,
    M: tl.constexpr,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    SPLITS: tl.constexpr,
    BM: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    SCALED: tl.constexpr,
    GROUP: tl.constexpr,
    FORMAT: tl.constexpr,
) -> None:
    """A block of y [T, GROUPS · M]."""
    block = tl.program_id(0)
    t_block = tl.program_id(1)
    product_block(
        x,
        weight,
        scale,
        y,
        partials,
        counters,
        T,
        block,
        t_block,
        M,
        K,
        GROUPS,
        SPLITS,
        BM,
        BT,
        BK,
        STAGES,
        SCALED,
        GROUP,
        FORMAT,
    )
