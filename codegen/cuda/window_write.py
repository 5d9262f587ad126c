"""Write of window keys into the ring of their sequence, a block per token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import triton.language as tl

from v41c.codegen.cuda.frame import Frame
from v41c.codegen.cuda.kernel import CudaKernel
from v41c.codegen.cuda.language import jit
from v41c.codegen.cuda.packed_rows import write_row
from v41c.codegen.cuda.rings import is_newest
from v41c.codegen.cuda.rows import power_of_two
from v41c.ir.op import Op
from v41c.ir.types import DType, TensorType
from v41c.targets.cuda import CudaTarget


def kernel(
    op: Op,
    operands: Sequence[TensorType | None],
    results: Sequence[TensorType],
    target: CudaTarget,
    bounds: Mapping[str, int],
) -> CudaKernel:
    """kv [T, HD] into window [S, W, row]."""
    frame = Frame(op, operands, results, bounds)
    add_ring_write(frame)
    return frame.kernel()


def add_ring_write(frame: Frame) -> None:
    """Launch the write of operand `kv` into operand `window`."""
    tokens, width = frame.type_of("kv").shape
    window = frame.type_of("window")
    frame.launch(
        window_write_token,
        {name: frame.operand(name) for name in ("window", "kv", "positions", "slots")}
        | {"T": frame.extent(tokens), "LENGTH": int(window.shape[1]), "WIDTH": int(width)}
        | {"FORMAT": "fp8_e8m0_32" if window.dtype == DType.U8 else None, "ROW": int(window.shape[2])}
        | {"BLOCK": max(32, power_of_two(int(width)))},
        (frame.tiles(tokens),),
    )


@jit
def window_write_token(
    window: tl.tensor,
    kv: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    T: tl.tensor,
    LENGTH: tl.constexpr,
    WIDTH: tl.constexpr,
    FORMAT: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One token; one that a later token overwrites writes nothing, for the order of blocks is open."""
    t = tl.program_id(0)
    position = tl.load(positions + t)
    slot = tl.load(slots + t)
    if is_newest(positions, slots, t, T, position, slot, LENGTH):
        k = tl.arange(0, BLOCK)
        values = tl.load(kv + t.to(tl.int64) * WIDTH + k, mask=k < WIDTH, other=0.0).to(tl.float32)
        row = slot.to(tl.int64) * LENGTH + position % LENGTH
        write_row(window + row * ROW, values, FORMAT, 32, WIDTH, BLOCK)
