"""Collapse of the residual copies to one sublayer input."""

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
    """stream [T, N, D] and pre [T, N] to [T, D]."""
    frame = Frame(op, operands, results, bounds)
    tokens, copies, width = frame.type_of("stream").shape
    blocks = row_blocks(frame, tokens, int(width))
    frame.launch(
        mix_rows,
        {"stream": frame.operand("stream"), "pre": frame.operand("pre"), "out": frame.result(0)}
        | {"N": int(copies), "WIDTH": int(width), "BLOCK": blocks.columns},
        blocks.grid,
        warps=blocks.warps,
    )
    return frame.kernel()


@jit
def mix_rows(
    stream: tl.tensor, pre: tl.tensor, out: tl.tensor, N: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """A block of columns of a token, over its copies in ascending order."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for copy in tl.static_range(N):
        place = (token * N + copy) * WIDTH + column
        values = tl.load(stream + place, mask=column < WIDTH, other=0.0).to(tl.float32)
        total += tl.load(pre + token * N + copy) * values
    tl.store(out + token * WIDTH + column, total.to(out.dtype.element_ty), mask=column < WIDTH)
