"""Elementwise sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

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
    """x and y [T, …, D] to their sum."""
    frame = Frame(op, operands, results, bounds)
    launch_sum(frame, "y", one_row=False)
    return frame.kernel()


def launch_sum(frame: Frame, addend: str, *, one_row: bool) -> None:
    """x [T, …, D] and another operand of its shape, or with `one_row` without T, to their sum."""
    tokens, *inner = frame.type_of("x").shape
    width = prod(int(size) for size in inner)
    blocks = row_blocks(frame, tokens, width)
    frame.launch(
        add_rows,
        {"x": frame.operand("x"), "y": frame.operand(addend), "out": frame.result(0)}
        | {"WIDTH": width, "STRIDE": 0 if one_row else width, "BLOCK": blocks.columns},
        blocks.grid,
        warps=blocks.warps,
    )


@jit
def add_rows(
    x: tl.tensor, y: tl.tensor, out: tl.tensor, WIDTH: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """A block of a row; rows of y begin STRIDE apart."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = row * WIDTH + column
    total = tl.load(x + place, mask=column < WIDTH, other=0.0).to(tl.float32)
    total += tl.load(y + row * STRIDE + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=column < WIDTH)
