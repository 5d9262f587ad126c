"""Embeddings of the positions of an image's span: a block of a token, from where its code says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import triton.language as tl

from v41c.codegen.cuda.frame import Arguments, Frame
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
    """x [T, D], image_rows [T], image_values [I, D] and delimiters [D] to [T, D]."""
    frame = Frame(op, operands, results, bounds)
    tokens, width = frame.type_of("x").shape
    blocks = row_blocks(frame, tokens, int(width))
    names = ("x", "image_rows", "image_values", "start", "newline", "end")
    buffers: Arguments = {name: frame.operand(name) for name in names}
    frame.launch(
        place_blocks,
        buffers | {"out": frame.result(0), "WIDTH": int(width), "BLOCK": blocks.columns},
        blocks.grid,
        warps=blocks.warps,
    )
    return frame.kernel()


@jit
def place_blocks(
    x: tl.tensor,
    image_rows: tl.tensor,
    image_values: tl.tensor,
    start: tl.tensor,
    newline: tl.tensor,
    end: tl.tensor,
    out: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """A block of a token; only its own source is read."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    code = tl.load(image_rows + token)
    values = tl.load(x + token * WIDTH + column, mask=inside & (code == -1), other=0.0).to(tl.float32)
    values += tl.load(image_values + code.to(tl.int64) * WIDTH + column, mask=inside & (code >= 0), other=0.0).to(
        tl.float32
    )
    values += tl.load(start + column, mask=inside & (code == -2), other=0.0).to(tl.float32)
    values += tl.load(newline + column, mask=inside & (code == -3), other=0.0).to(tl.float32)
    values += tl.load(end + column, mask=inside & (code == -4), other=0.0).to(tl.float32)
    tl.store(out + token * WIDTH + column, values.to(out.dtype.element_ty), mask=inside)
