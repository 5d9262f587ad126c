"""Patches side by side: a block a few elements of all patches of a row."""

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

#: elements of a block: 16 a thread of 4 warps
_ELEMENTS = 2048


def kernel(
    op: Op,
    operands: Sequence[TensorType | None],
    results: Sequence[TensorType],
    target: CudaTarget,
    bounds: Mapping[str, int],
) -> CudaKernel:
    """x [T, D] and sources [R, G] to [R, D · G]."""
    frame = Frame(op, operands, results, bounds)
    width = int(frame.type_of("x").shape[1])
    rows, group = frame.type_of("sources").shape
    across = power_of_two(int(group))
    block = min(power_of_two(width), max(1, _ELEMENTS // across))
    frame.launch(
        merge_blocks,
        {"x": frame.operand("x"), "sources": frame.operand("sources"), "out": frame.result(0)}
        | {"WIDTH": width, "GROUP": int(group), "BD": block, "BG": across},
        (frame.tiles(rows), -(-width // block)),
    )
    return frame.kernel()


@jit
def merge_blocks(
    x: tl.tensor,
    sources: tl.tensor,
    out: tl.tensor,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    BD: tl.constexpr,
    BG: tl.constexpr,
) -> None:
    """BD elements of the GROUP patches of a row."""
    row = tl.program_id(0).to(tl.int64)
    member = tl.arange(0, BG)
    source = tl.load(sources + row * GROUP + member, mask=member < GROUP, other=-1)
    element = tl.program_id(1) * BD + tl.arange(0, BD)
    inside = (element[:, None] < WIDTH) & (member[None, :] < GROUP)
    place = source[None, :].to(tl.int64) * WIDTH + element[:, None]
    values = tl.load(x + place, mask=inside & (source[None, :] >= 0), other=0.0)
    tl.store(out + row * (WIDTH * GROUP) + element[:, None] * GROUP + member[None, :], values, mask=inside)
