"""Rotary position embedding of the last elements of every row: a block a few heads of a token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import triton.language as tl

from v41c.codegen.cuda.frame import Arguments, Frame
from v41c.codegen.cuda.kernel import CudaKernel
from v41c.codegen.cuda.language import jit
from v41c.codegen.cuda.rows import power_of_two
from v41c.ir.op import Op
from v41c.ir.types import TensorType
from v41c.targets.cuda import CudaTarget

#: elements of a block: 32 a thread of 4 warps, four 16-byte accesses of bf16
_ELEMENTS = 4096


def kernel(
    op: Op,
    operands: Sequence[TensorType | None],
    results: Sequence[TensorType],
    target: CudaTarget,
    bounds: Mapping[str, int],
) -> CudaKernel:
    """x [T, D] or [T, H, D], cos and sin [T, P]."""
    frame = Frame(op, operands, results, bounds)
    tokens, *inner = frame.type_of("x").shape
    width, heads = int(inner[-1]), int(inner[0]) if len(inner) == 2 else 1
    pairs = int(frame.type_of("cos").shape[1])
    kept = width - 2 * pairs
    block = max(1, min(power_of_two(heads), _ELEMENTS // power_of_two(width)))
    buffers: Arguments = {name: frame.operand(name) for name in ("x", "cos", "sin")}
    frame.launch(
        rope_heads,
        buffers
        | {"out": frame.result(0), "HEADS": heads, "KEPT": kept, "PAIRS": pairs, "BH": block}
        | {"BK": power_of_two(kept), "BP": power_of_two(pairs), "INVERSE": bool(op.attributes()["inverse"])},
        (frame.tiles(tokens), -(-heads // block)),
    )
    return frame.kernel()


@jit
def rotated_pairs(pairs: tl.tensor, cos: tl.tensor, sin: tl.tensor) -> tl.tensor:
    """f32 pairs [..., P, 2] rotated by angles of cosine and sine [..., P]."""
    a, b = tl.split(pairs)
    return tl.join(a * cos - b * sin, a * sin + b * cos)


@jit
def rope_heads(
    x: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    out: tl.tensor,
    HEADS: tl.constexpr,
    KEPT: tl.constexpr,
    PAIRS: tl.constexpr,
    BH: tl.constexpr,
    BK: tl.constexpr,
    BP: tl.constexpr,
    INVERSE: tl.constexpr,
) -> None:
    """BH heads of a token: KEPT elements of each as they are, then PAIRS pairs."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BH + tl.arange(0, BH)
    row = (token * HEADS + head) * (KEPT + 2 * PAIRS)
    if KEPT > 0:
        column = tl.arange(0, BK)
        place = row[:, None] + column[None, :]
        inside = (head[:, None] < HEADS) & (column[None, :] < KEPT)
        tl.store(out + place, tl.load(x + place, mask=inside, other=0.0), mask=inside)
    pair = tl.arange(0, BP)
    cosine = tl.load(cos + token * PAIRS + pair, mask=pair < PAIRS, other=0.0)
    sine = tl.load(sin + token * PAIRS + pair, mask=pair < PAIRS, other=0.0)
    if INVERSE:
        sine = -sine
    element = tl.arange(0, 2 * BP)
    place = row[:, None] + (KEPT + element[None, :])
    inside = (head[:, None] < HEADS) & (element[None, :] < 2 * PAIRS)
    values = tl.reshape(tl.load(x + place, mask=inside, other=0.0).to(tl.float32), (BH, BP, 2))
    turned = tl.reshape(rotated_pairs(values, cosine[None, :], sine[None, :]), (BH, 2 * BP))
    tl.store(out + place, turned.to(out.dtype.element_ty), mask=inside)
