"""Root-mean-square normalisation: a block a row, which stays in registers between the sum and the scaling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import triton.language as tl

from v41c.codegen.cuda.frame import Frame
from v41c.codegen.cuda.kernel import CudaKernel
from v41c.codegen.cuda.language import jit
from v41c.codegen.cuda.rows import power_of_two, row_blocks
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
    """x [T, D] and weight [D] to [T, D]."""
    frame = Frame(op, operands, results, bounds)
    tokens, width = frame.type_of("x").shape
    blocks = row_blocks(frame, tokens, int(width), most=power_of_two(int(width)))
    frame.launch(
        rms_norm_rows,
        {"x": frame.operand("x"), "weight": frame.operand("weight"), "out": frame.result(0)}
        | {"EPS": float(op.attributes()["eps"]), "WIDTH": int(width), "BLOCK": blocks.columns},
        blocks.grid,
        warps=blocks.warps,
    )
    return frame.kernel()


@jit
def normed(values: tl.tensor, weight: tl.tensor, EPS: tl.constexpr, WIDTH: tl.constexpr) -> tl.tensor:
    """f32 rows [..., B] scaled by weight [..., B] over their root mean square; zeros beyond WIDTH add nothing."""
    mean = tl.sum(values * values, axis=-1) / WIDTH
    return weight * (values * tl.expand_dims(tl.math.rsqrt(mean + EPS), -1))


@jit
def rms_norm_rows(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    EPS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """A row."""
    column = tl.arange(0, BLOCK)
    place = tl.program_id(0).to(tl.int64) * WIDTH + column
    values = tl.load(x + place, mask=column < WIDTH, other=0.0).to(tl.float32)
    factors = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    tl.store(out + place, normed(values, factors, EPS, WIDTH).to(out.dtype.element_ty), mask=column < WIDTH)
