"""A product with one stored weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import triton.language as tl

from v41c.codegen.cuda.frame import Frame
from v41c.codegen.cuda.kernel import CudaKernel
from v41c.codegen.cuda.language import jit
from v41c.codegen.cuda.product import product_tile, tiling
from v41c.ir.op import Op
from v41c.ir.types import TensorType
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
    weight, tokens = frame.type_of("weight"), frame.type_of("x").shape[0]
    rows, columns = (int(dim) for dim in weight.shape)
    tile = tiling(weight, frame.bound(tokens))
    frame.launch(
        linear_tile,
        {
            "x": frame.operand("x"),
            "weight": frame.operand("weight"),
            "scale": frame.operand("scale"),
            "y": frame.result(0),
            "T": frame.extent(tokens),
            "M": rows,
            "K": columns,
            "BM": tile.m,
            "BT": tile.t,
            "BK": tile.k,
        },
        (-(-rows // tile.m), frame.tiles(tokens, tile.t)),
        warps=tile.warps,
        stages=tile.stages,
    )
    return frame.kernel()


@jit
def linear_tile(
    x: tl.tensor,
    weight: tl.tensor,
    scale: tl.tensor,
    y: tl.tensor,
    T: tl.tensor,
    M: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
) -> None:
    """A tile of y [T, M]."""
    product_tile(x, weight, scale, y, T, tl.program_id(0), tl.program_id(1), M, K, K, M, BM, BT, BK)
