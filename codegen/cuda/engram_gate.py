"""The gate of an Engram lookup: one block for each token and copy of the stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import triton.language as tl

from v41c.codegen.cuda.frame import Arguments, Frame
from v41c.codegen.cuda.kernel import CudaKernel
from v41c.codegen.cuda.language import jit
from v41c.codegen.cuda.numeric import sigmoid
from v41c.codegen.cuda.rows import power_of_two

if TYPE_CHECKING:
    from v41c.ir.ops.engram_gate import EngramGate
    from v41c.ir.types import TensorType
    from v41c.targets.cuda import CudaTarget

#: elements of a step: 16 for each thread of 16 warps. A release row of 5,120 is one step
_ELEMENTS = 8192


def kernel(
    op: EngramGate,
    operands: Sequence[TensorType | None],
    results: Sequence[TensorType],
    target: CudaTarget,
    bounds: Mapping[str, int],
) -> CudaKernel:
    """out [T, N, D] of stream [T, N, D] and kv [T, (N + 1) · D]."""
    frame = Frame(op, operands, results, bounds)
    tokens, copies, width = frame.type_of("stream").shape
    block = min(_ELEMENTS, power_of_two(int(width)))
    arguments: Arguments = {name: frame.operand(name) for name in ("stream", "kv", "q_weight", "k_weight", "image")}
    sizes: Arguments = {"COPIES": int(copies), "WIDTH": int(width), "EPS": op.eps, "BLOCK": block}
    frame.launch(
        gate_copy,
        arguments | {"out": frame.result(0)} | sizes,
        (frame.tiles(tokens), int(copies)),
        warps=max(1, block // 512),
    )
    return frame.kernel()


@jit
def gate_copy(
    stream: tl.tensor,
    kv: tl.tensor,
    q_weight: tl.tensor,
    k_weight: tl.tensor,
    image: tl.tensor,
    out: tl.tensor,
    COPIES: tl.constexpr,
    WIDTH: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """X + σ(±√|s|) · v for one copy of a token's stream."""
    token, copy = tl.program_id(0).to(tl.int64), tl.program_id(1)
    x_row = (token * COPIES + copy) * WIDTH
    key_row, value_row = (token * (COPIES + 1) + copy) * WIDTH, (token * (COPIES + 1) + COPIES) * WIDTH
    dots = tl.zeros((BLOCK,), tl.float32)
    x_squares, k_squares = dots, dots
    for start in range(0, WIDTH, BLOCK):
        d = start + tl.arange(0, BLOCK)
        x = tl.load(stream + x_row + d, mask=d < WIDTH, other=0.0).to(tl.float32)
        k = tl.load(kv + key_row + d, mask=d < WIDTH, other=0.0).to(tl.float32)
        q_w = tl.load(q_weight + copy * WIDTH + d, mask=d < WIDTH, other=0.0).to(tl.float32)
        k_w = tl.load(k_weight + copy * WIDTH + d, mask=d < WIDTH, other=0.0).to(tl.float32)
        dots += x * q_w * k_w * k
        x_squares += x * x
        k_squares += k * k
    s = tl.sum(dots, axis=0) * (WIDTH**-0.5)
    s = s * tl.math.rsqrt(tl.sum(x_squares, axis=0) / WIDTH + EPS)
    s = s * tl.math.rsqrt(tl.sum(k_squares, axis=0) / WIDTH + EPS)
    root = tl.math.sqrt_rn(tl.maximum(tl.abs(s), 1e-6, propagate_nan=tl.PropagateNan.ALL))
    gate = sigmoid(tl.where(s.to(tl.int32, bitcast=True) < 0, -root, root))
    if image is not None:
        gate = tl.where(tl.load(image + token) != 0, 0.0, gate)
    for start in range(0, WIDTH, BLOCK):
        d = start + tl.arange(0, BLOCK)
        x = tl.load(stream + x_row + d, mask=d < WIDTH, other=0.0).to(tl.float32)
        v = tl.load(kv + value_row + d, mask=d < WIDTH, other=0.0).to(tl.float32)
        tl.store(out + x_row + d, (x + gate * v).to(out.dtype.element_ty), mask=d < WIDTH)
