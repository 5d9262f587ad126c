"""Update of the residual stream by a sublayer's output."""

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
    """stream [T, N, D], y [T, D], post [T, N] and comb [T, N, N] to [T, N, D]."""
    frame = Frame(op, operands, results, bounds)
    tokens, copies, width = frame.type_of("stream").shape
    blocks = row_blocks(frame, tokens, int(width))
    frame.launch(
        update_rows,
        {name: frame.operand(name) for name in ("stream", "y", "post", "comb")}
        | {"out": frame.result(0), "N": int(copies), "WIDTH": int(width), "BLOCK": blocks.columns},
        blocks.grid,
        warps=blocks.warps,
    )
    return frame.kernel()


@jit
def update_rows(
    stream: tl.tensor,
    y: tl.tensor,
    post: tl.tensor,
    comb: tl.tensor,
    out: tl.tensor,
    N: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """A block of columns of a token's copies."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    added = tl.load(y + token * WIDTH + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    sources: tl.tuple = ()
    for source in tl.static_range(N):
        place = (token * N + source) * WIDTH + column
        sources += (tl.load(stream + place, mask=column < WIDTH, other=0.0).to(tl.float32),)
    for target in tl.static_range(N):
        total = tl.zeros((BLOCK,), tl.float32)
        for source in tl.static_range(N):
            total += tl.load(comb + token * (N * N) + source * N + target) * sources[source]
        total = tl.load(post + token * N + target) * added + total
        place = (token * N + target) * WIDTH + column
        tl.store(out + place, total.to(out.dtype.element_ty), mask=column < WIDTH)
