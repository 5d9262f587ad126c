"""Gaussian error linear unit, exact."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import triton.language as tl

from v41c.codegen.cuda.frame import Frame
from v41c.codegen.cuda.kernel import CudaKernel
from v41c.codegen.cuda.language import jit
from v41c.codegen.cuda.numeric import normal_below
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
    """x [T, M] to [T, M]."""
    frame = Frame(op, operands, results, bounds)
    tokens, width = frame.type_of("x").shape
    blocks = row_blocks(frame, tokens, int(width))
    frame.launch(
        gelu_rows,
        {"x": frame.operand("x"), "out": frame.result(0), "WIDTH": int(width), "BLOCK": blocks.columns},
        blocks.grid,
        warps=blocks.warps,
    )
    return frame.kernel()


@jit
def gelu_rows(x: tl.tensor, out: tl.tensor, WIDTH: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """A block of a row."""
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = tl.program_id(0).to(tl.int64) * WIDTH + column
    values = tl.load(x + place, mask=column < WIDTH, other=0.0).to(tl.float32)
    tl.store(out + place, (values * normal_below(values)).to(out.dtype.element_ty), mask=column < WIDTH)
