"""Write of compressed ids into the Engram history of their sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import triton.language as tl

from v41c.codegen.cuda.frame import Frame
from v41c.codegen.cuda.kernel import CudaKernel
from v41c.codegen.cuda.language import jit
from v41c.codegen.cuda.rings import is_newest
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
    """ids i32 [T] into history i32 [S, L]."""
    frame = Frame(op, operands, results, bounds)
    (tokens,) = frame.type_of("ids").shape
    frame.launch(
        history_write_tokens,
        {name: frame.operand(name) for name in ("history", "ids", "positions", "slots")}
        | {"T": frame.extent(tokens), "LENGTH": int(frame.type_of("history").shape[1]), "BLOCK": _BLOCK},
        (frame.tiles(tokens, _BLOCK),),
    )
    return frame.kernel()


@jit
def history_write_tokens(
    history: tl.tensor,
    ids: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    T: tl.tensor,
    LENGTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """A block of tokens; those that a later token overwrites write nothing, for the order of stores is open."""
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    position = tl.load(positions + t, mask=t < T, other=0)
    slot = tl.load(slots + t, mask=t < T, other=0)
    written = (t < T) & is_newest(positions, slots, t, T, position, slot, LENGTH)
    value = tl.load(ids + t, mask=t < T, other=0)
    tl.store(history + slot.to(tl.int64) * LENGTH + position % LENGTH, value, mask=written)
