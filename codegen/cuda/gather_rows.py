"""The rows of a step that get logits."""

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
    """x [T, D] and rows [R] to [R, D]."""
    frame = Frame(op, operands, results, bounds)
    width = int(frame.type_of("x").shape[1])
    blocks = row_blocks(frame, frame.type_of("rows").shape[0], width)
    frame.launch(
        gather_blocks,
        {"x": frame.operand("x"), "rows": frame.operand("rows"), "out": frame.result(0)}
        | {"WIDTH": width, "BLOCK": blocks.columns},
        blocks.grid,
        warps=blocks.warps,
    )
    return frame.kernel()


@jit
def gather_blocks(x: tl.tensor, rows: tl.tensor, out: tl.tensor, WIDTH: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """A block of out[r] = x[rows[r]], in the type of `out`."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(rows + row).to(tl.int64) * WIDTH + column
    values = tl.load(x + source, mask=column < WIDTH, other=0)
    tl.store(out + row * WIDTH + column, values.to(out.dtype.element_ty), mask=column < WIDTH)
