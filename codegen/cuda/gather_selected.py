"""Selected rows of a compressed cache, dequantised, without gaps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import triton.language as tl

from v41c.codegen.cuda.frame import Frame
from v41c.codegen.cuda.kernel import CudaKernel
from v41c.codegen.cuda.language import jit
from v41c.codegen.cuda.packed_rows import read_fp4_rows, read_plain_rows
from v41c.codegen.cuda.rows import power_of_two
from v41c.ir.op import Op
from v41c.ir.types import DType, TensorType
from v41c.targets.cuda import CudaTarget

#: rows of a block: 8 of 256 bytes give 128 threads 16 bytes each
_ROWS = 8


def kernel(
    op: Op,
    operands: Sequence[TensorType | None],
    results: Sequence[TensorType],
    target: CudaTarget,
    bounds: Mapping[str, int],
) -> CudaKernel:
    """compressed [S, C, row] and selection i32 [T, K] to rows f32 [T, K, stride]."""
    frame, attributes = Frame(op, operands, results, bounds), op.attributes()
    tokens, count = frame.type_of("selection").shape
    compressed = frame.type_of("compressed")
    width, stride = int(attributes["width"]), int(attributes["stride"])
    frame.launch(
        gather_selected_rows,
        {name: frame.operand(name) for name in ("compressed", "selection", "slots")}
        | {"out": frame.result(0), "C": frame.extent(compressed.shape[1]), "COUNT": int(count), "WIDTH": width}
        | {"STRIDE": stride, "PACKED": compressed.dtype == DType.U8, "ROWS": _ROWS}
        | {"PLACES": power_of_two(int(count)), "BLOCK": max(32, power_of_two(stride))},
        (frame.tiles(tokens), -(-int(count) // _ROWS)),
    )
    return frame.kernel()


@jit
def gather_selected_rows(
    compressed: tl.tensor,
    selection: tl.tensor,
    slots: tl.tensor,
    out: tl.tensor,
    C: tl.tensor,
    COUNT: tl.constexpr,
    WIDTH: tl.constexpr,
    STRIDE: tl.constexpr,
    PACKED: tl.constexpr,
    ROWS: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """The rows of ROWS places of a token's selection, and the zeros of as many places of the result."""
    t = tl.program_id(0).to(tl.int64)
    every = tl.arange(0, PLACES)
    entries = tl.load(selection + t * COUNT + every, mask=every < COUNT, other=-1)
    taken = (entries >= 0).to(tl.int32)
    place = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    before = tl.sum(tl.where(every < tl.program_id(1) * ROWS, taken, 0), axis=0)
    chosen = tl.load(selection + t * COUNT + place, mask=place < COUNT, other=-1)
    rank = before + tl.cumsum((chosen >= 0).to(tl.int32), axis=0) - 1
    rows = tl.load(slots + t).to(tl.int64) * C + chosen
    if PACKED:
        values = read_fp4_rows(compressed, rows, chosen >= 0, WIDTH, 16, False, BLOCK)
    else:
        values = read_plain_rows(compressed, rows, chosen >= 0, WIDTH, WIDTH, BLOCK)
    k = tl.arange(0, BLOCK)[None, :]
    inside = k < STRIDE
    tl.store(out + (t * COUNT + rank)[:, None] * STRIDE + k, values, mask=(chosen >= 0)[:, None] & inside)
    empty = (place >= tl.sum(taken, axis=0)) & (place < COUNT)
    tl.store(out + (t * COUNT + place)[:, None] * STRIDE + k, tl.zeros_like(values), mask=empty[:, None] & inside)
