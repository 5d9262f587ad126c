"""Token ids in the Engram's smaller id space."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import triton.language as tl

from v41c.codegen.cuda.frame import Frame
from v41c.codegen.cuda.kernel import CudaKernel
from v41c.codegen.cuda.language import jit
from v41c.ir.op import Op
from v41c.ir.types import TensorType
from v41c.targets.cuda import CudaTarget

#: tokens of a block, one a thread
_BLOCK = 128


def kernel(
    op: Op,
    operands: Sequence[TensorType | None],
    results: Sequence[TensorType],
    target: CudaTarget,
    bounds: Mapping[str, int],
) -> CudaKernel:
    """tokens i32 [T] and table i32 [V] to i32 [T]."""
    frame = Frame(op, operands, results, bounds)
    (tokens,) = frame.type_of("tokens").shape
    frame.launch(
        compress_ids,
        {"tokens": frame.operand("tokens"), "table": frame.operand("table"), "ids": frame.result(0)}
        | {"T": frame.extent(tokens), "IMAGE": int(op.attributes()["image_token"]), "BLOCK": _BLOCK},
        (frame.tiles(tokens, _BLOCK),),
    )
    return frame.kernel()


@jit
def compress_ids(
    tokens: tl.tensor, table: tl.tensor, ids: tl.tensor, T: tl.tensor, IMAGE: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """A block of tokens."""
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(tokens + t, mask=t < T, other=IMAGE)
    known = (t < T) & (token != IMAGE)
    tl.store(ids + t, tl.load(table + token, mask=known, other=-1), mask=t < T)
