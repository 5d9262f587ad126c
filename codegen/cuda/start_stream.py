"""The residual stream after the embedding: equal copies, and the mix that reads the first."""

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
    """x [T, D] to stream [T, N, D] and mix [T, N]."""
    frame = Frame(op, operands, results, bounds)
    tokens, width = frame.type_of("x").shape
    copies = int(op.attributes()["copies"])
    blocks = row_blocks(frame, tokens, int(width))
    frame.launch(
        copy_rows,
        {"x": frame.operand("x"), "stream": frame.result(0), "mix": frame.result(1), "N": copies}
        | {"BN": power_of_two(copies), "WIDTH": int(width), "BLOCK": blocks.columns},
        blocks.grid,
        warps=blocks.warps,
    )
    return frame.kernel()


@jit
def copy_rows(
    x: tl.tensor,
    stream: tl.tensor,
    mix: tl.tensor,
    N: tl.constexpr,
    BN: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """A block of columns of a token, N times; the mix once a token."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + token * WIDTH + column, mask=column < WIDTH, other=0.0)
    for copy in tl.static_range(N):
        tl.store(stream + (token * N + copy) * WIDTH + column, values, mask=column < WIDTH)
    if tl.program_id(1) == 0:
        copies = tl.arange(0, BN)
        tl.store(mix + token * N + copies, (copies == 0).to(tl.float32), mask=copies < N)
