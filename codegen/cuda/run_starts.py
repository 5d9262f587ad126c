"""Where each token's run starts, by one block that holds the whole step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import triton.language as tl

from v41c.codegen.cuda.frame import Frame
from v41c.codegen.cuda.kernel import CudaKernel
from v41c.codegen.cuda.language import jit
from v41c.codegen.cuda.rows import power_of_two
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
    """positions and slots i32 [T] to starts i32 [T]: a scan over at most a few hundred integers."""
    frame = Frame(op, operands, results, bounds)
    (tokens,) = frame.type_of("positions").shape
    block = power_of_two(frame.bound(tokens))
    frame.launch(
        run_starts_step,
        {"positions": frame.operand("positions"), "slots": frame.operand("slots"), "starts": frame.result(0)}
        | {"T": frame.extent(tokens), "BLOCK": block},
        (frame.tiles(tokens, block),),
    )
    return frame.kernel()


@jit
def _later(left: tl.tensor, right: tl.tensor) -> tl.tensor:
    return tl.maximum(left, right)


@jit
def run_starts_step(
    positions: tl.tensor, slots: tl.tensor, starts: tl.tensor, T: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """The last row up to each that continues no run."""
    row = tl.arange(0, BLOCK)
    behind = (row > 0) & (row < T)
    position = tl.load(positions + row, mask=row < T, other=0)
    slot = tl.load(slots + row, mask=row < T, other=0)
    position_before = tl.load(positions + row - 1, mask=behind, other=0)
    slot_before = tl.load(slots + row - 1, mask=behind, other=0)
    continues = behind & (slot == slot_before) & (position == position_before + 1)
    begins = tl.where(continues, 0, row)
    tl.store(starts + row, tl.associative_scan(begins, 0, _later), mask=row < T)
