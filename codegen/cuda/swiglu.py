"""Clamped gated activation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import triton.language as tl

from v41c.codegen.cuda.frame import Frame
from v41c.codegen.cuda.kernel import CudaKernel
from v41c.codegen.cuda.language import jit
from v41c.codegen.cuda.numeric import sigmoid
from v41c.codegen.cuda.rows import row_blocks
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
    """gate and up [T, M] to [T, M]."""
    frame = Frame(op, operands, results, bounds)
    tokens, width = frame.type_of("gate").shape
    blocks = row_blocks(frame, tokens, int(width))
    frame.launch(
        swiglu_rows,
        {"gate": frame.operand("gate"), "up": frame.operand("up"), "out": frame.result(0)}
        | {"LIMIT": float(op.attributes()["limit"]), "WIDTH": int(width), "BLOCK": blocks.columns},
        blocks.grid,
        warps=blocks.warps,
    )
    return frame.kernel()


@jit
def gated(gate: tl.tensor, up: tl.tensor, LIMIT: tl.constexpr) -> tl.tensor:
    """silu(min(gate, limit)) · clamp(up, −limit, limit) of f32 values."""
    bounded = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    factor = tl.minimum(up, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return bounded * sigmoid(bounded) * tl.maximum(factor, -LIMIT, propagate_nan=tl.PropagateNan.ALL)


@jit
def swiglu_rows(
    gate: tl.tensor,
    up: tl.tensor,
    out: tl.tensor,
    LIMIT: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """A block of a row."""
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = tl.program_id(0).to(tl.int64) * WIDTH + column
    opening = tl.load(gate + place, mask=column < WIDTH, other=0.0).to(tl.float32)
    values = tl.load(up + place, mask=column < WIDTH, other=0.0).to(tl.float32)
    tl.store(out + place, gated(opening, values, LIMIT).to(out.dtype.element_ty), mask=column < WIDTH)
