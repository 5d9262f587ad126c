"""Rotary position embedding that pairs the halves of a head: a block a few heads of a token."""

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
    """x [T, H, D], cos and sin [T, D / 2]."""
    frame = Frame(op, operands, results, bounds)
    tokens, heads, width = frame.type_of("x").shape
    half = int(width) // 2
    block = max(1, min(power_of_two(int(heads)), _ELEMENTS // power_of_two(int(width))))
    buffers: Arguments = {name: frame.operand(name) for name in ("x", "cos", "sin")}
    frame.launch(
        rope_halves_heads,
        buffers
        | {"out": frame.result(0), "HEADS": int(heads), "TURNED": int(op.attributes()["heads"]), "HALF": half}
        | {"BH": block, "BP": power_of_two(half)},
        (frame.tiles(tokens), -(-int(heads) // block)),
    )
    return frame.kernel()


@jit
def rope_halves_heads(
    x: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    out: tl.tensor,
    HEADS: tl.constexpr,
    TURNED: tl.constexpr,
    HALF: tl.constexpr,
    BH: tl.constexpr,
    BP: tl.constexpr,
) -> None:
    """BH heads of a token, of which those below TURNED are rotated."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BH + tl.arange(0, BH)
    pair = tl.arange(0, BP)
    c = tl.load(cos + token * HALF + pair, mask=pair < HALF, other=1.0)[None, :]
    s = tl.load(sin + token * HALF + pair, mask=pair < HALF, other=0.0)[None, :]
    turned = (head < TURNED)[:, None]
    c = tl.where(turned, c, 1.0)
    s = tl.where(turned, s, 0.0)
    place = ((token * HEADS + head) * (2 * HALF))[:, None] + pair[None, :]
    inside = (head[:, None] < HEADS) & (pair[None, :] < HALF)
    a = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + place + HALF, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, (a * c - b * s).to(out.dtype.element_ty), mask=inside)
    tl.store(out + place + HALF, (b * c + a * s).to(out.dtype.element_ty), mask=inside)
