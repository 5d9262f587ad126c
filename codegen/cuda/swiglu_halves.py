"""Gated activation of gate and up side by side."""

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
    """x [T, 2 · M] to [T, M]."""
    frame = Frame(op, operands, results, bounds)
    tokens, both = frame.type_of("x").shape
    width = int(both) // 2
    blocks = row_blocks(frame, tokens, width)
    frame.launch(
        swiglu_halves_rows,
        {"x": frame.operand("x"), "out": frame.result(0), "WIDTH": width, "BLOCK": blocks.columns},
        blocks.grid,
        warps=blocks.warps,
    )
    return frame.kernel()


@jit
def swiglu_halves_rows(x: tl.tensor, out: tl.tensor, WIDTH: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """A block of a row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = x + row * (2 * WIDTH) + column
    gate = tl.load(source, mask=column < WIDTH, other=0.0).to(tl.float32)
    up = tl.load(source + WIDTH, mask=column < WIDTH, other=0.0).to(tl.float32)
    values = gate * sigmoid(gate) * up
    tl.store(out + row * WIDTH + column, values.to(out.dtype.element_ty), mask=column < WIDTH)
