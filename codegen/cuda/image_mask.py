"""Which tokens belong to an image span."""

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
    """tokens i32 [T] to bool [T]."""
    frame = Frame(op, operands, results, bounds)
    (tokens,) = frame.type_of("tokens").shape
    frame.launch(
        image_mask_tokens,
        {"tokens": frame.operand("tokens"), "mask": frame.result(0), "T": frame.extent(tokens)}
        | {"IMAGE": int(op.attributes()["image_token"]), "BLOCK": _BLOCK},
        (frame.tiles(tokens, _BLOCK),),
    )
    return frame.kernel()


@jit
def image_mask_tokens(
    tokens: tl.tensor, mask: tl.tensor, T: tl.tensor, IMAGE: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """A block of tokens."""
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(tokens + t, mask=t < T, other=0)
    tl.store(mask + t, (token == IMAGE).to(tl.uint8), mask=t < T)
