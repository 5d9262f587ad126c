"""Rotation angles: f32 position times f32 frequency, a block a token's pairs.

The frequencies are constants of the kernel, one f32 after another in an integer: 4 bytes each, 32 at most in releases.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

import triton.language as tl

from v41c.codegen.cuda.frame import Frame
from v41c.codegen.cuda.kernel import CudaKernel
from v41c.codegen.cuda.language import jit
from v41c.codegen.cuda.rows import power_of_two
from v41c.ir.ops.rope_table import RopeTable
from v41c.ir.types import TensorType
from v41c.targets.cuda import CudaTarget

#: tokens of a block
_TOKENS = 8


def kernel(
    op: RopeTable,
    operands: Sequence[TensorType | None],
    results: Sequence[TensorType],
    target: CudaTarget,
    bounds: Mapping[str, int],
) -> CudaKernel:
    """positions [T] to cos and sin [T, P]."""
    frame = Frame(op, operands, results, bounds)
    tokens = frame.type_of("positions").shape[0]
    frequencies = [float(value) for value in op.frequencies()]
    frame.launch(
        rope_angles,
        {"positions": frame.operand("positions"), "cos": frame.result(0), "sin": frame.result(1)}
        | {"T": frame.extent(tokens), "FREQUENCIES": packed(frequencies), "OFFSET": op.offset}
        | {"PAIRS": len(frequencies), "BP": power_of_two(len(frequencies)), "BT": _TOKENS},
        (frame.tiles(tokens, _TOKENS),),
        warps=2,
    )
    return frame.kernel()


def packed(values: Sequence[float]) -> int:
    """The bits of f32 values in one integer, the first value lowest."""
    return int.from_bytes(struct.pack(f"<{len(values)}f", *values), "little")


@jit
def rope_angles(
    positions: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    T: tl.tensor,
    FREQUENCIES: tl.constexpr,
    OFFSET: tl.constexpr,
    PAIRS: tl.constexpr,
    BP: tl.constexpr,
    BT: tl.constexpr,
) -> None:
    """BT tokens."""
    pair = tl.arange(0, BP)
    bits = tl.zeros((BP,), tl.int32)
    for index in tl.static_range(PAIRS):
        # positive numbers, whose sign bit is clear
        bits = tl.where(pair == index, (FREQUENCIES >> (32 * index)) & 0x7FFFFFFF, bits)
    frequency = bits.to(tl.float32, bitcast=True)
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    position = tl.maximum(tl.load(positions + token, mask=token < T, other=0) + OFFSET, 0)
    angle = position.to(tl.float32)[:, None] * frequency[None, :]
    place = token[:, None].to(tl.int64) * PAIRS + pair[None, :]
    inside = (token[:, None] < T) & (pair[None, :] < PAIRS)
    tl.store(cos + place, tl.cos(angle), mask=inside)
    tl.store(sin + place, tl.sin(angle), mask=inside)
