"""Two tensors side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import triton.language as tl

from v41c.codegen.cuda.frame import Frame
from v41c.codegen.cuda.kernel import CudaKernel
from v41c.codegen.cuda.language import jit
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
    """x [T, A] and y [T, B] to [T, A + B]."""
    frame = Frame(op, operands, results, bounds)
    tokens, left = frame.type_of("x").shape
    right = frame.type_of("y").shape[1]
    blocks = row_blocks(frame, tokens, int(left) + int(right))
    frame.launch(
        concat_rows,
        {"x": frame.operand("x"), "y": frame.operand("y"), "out": frame.result(0)}
        | {"LEFT": int(left), "RIGHT": int(right), "BLOCK": blocks.columns},
        blocks.grid,
        warps=blocks.warps,
    )
    return frame.kernel()


@jit
def concat_rows(
    x: tl.tensor, y: tl.tensor, out: tl.tensor, LEFT: tl.constexpr, RIGHT: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """A block of a row of the result, from either operand or both."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    left = tl.load(x + row * LEFT + column, mask=column < LEFT, other=0)
    inside = (column >= LEFT) & (column < LEFT + RIGHT)
    right = tl.load(y + row * RIGHT + (column - LEFT), mask=inside, other=0)
    values = tl.where(column < LEFT, left, right)
    tl.store(out + row * (LEFT + RIGHT) + column, values, mask=column < LEFT + RIGHT)
