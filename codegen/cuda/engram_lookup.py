"""Rows of an Engram table, dequantised."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import triton.language as tl

from v41c.codegen.cuda.frame import Buffer, Frame
from v41c.codegen.cuda.kernel import CudaKernel
from v41c.codegen.cuda.language import jit
from v41c.codegen.cuda.numeric import decode_e8m0
from v41c.codegen.cuda.rows import power_of_two

if TYPE_CHECKING:
    from v41c.ir.op import Op
    from v41c.ir.types import TensorType
    from v41c.targets.cuda import CudaTarget

#: elements of a block: 16 a thread, which a 16-byte load of fp8 holds
_ELEMENTS = 1024


def kernel(
    op: Op,
    operands: Sequence[TensorType | None],
    results: Sequence[TensorType],
    target: CudaTarget,
    bounds: Mapping[str, int],
) -> CudaKernel:
    """out [T, Q · W] of rows [T, Q] and table [R, W]."""
    frame = Frame(op, operands, results, bounds)
    launch_lookup(frame, None)
    return frame.kernel()


def launch_lookup(frame: Frame, places: Buffer | None) -> None:
    """The launch: row j of `rows` goes to place j, or to places[j]; 2 warps for a block of some rows."""
    tokens, lookups = frame.type_of("rows").shape
    width = int(frame.type_of("table").shape[1])
    columns = power_of_two(width)
    block = max(1, _ELEMENTS // columns)
    frame.launch(
        look_up_rows,
        {
            "rows": frame.operand("rows"),
            "places": places,
            "table": frame.operand("table"),
            "scale": frame.operand("scale"),
            "out": frame.result(0),
            "T": frame.extent(tokens),
            "LOOKUPS": int(lookups),
            "WIDTH": width,
            "BLOCK": block,
            "COLUMNS": columns,
        },
        (frame.tiles(tokens, 1, -(-int(lookups) // block)),),
        warps=2,
    )


@jit
def look_up_rows(
    rows: tl.tensor,
    places: tl.tensor,
    table: tl.tensor,
    scale: tl.tensor,
    out: tl.tensor,
    T: tl.tensor,
    LOOKUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """BLOCK rows of a table [R, WIDTH] of bf16, f32, or fp8 with a scale for every 32."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = pair < T * LOOKUPS
    row = tl.load(rows + pair, mask=inside, other=0)
    place = pair
    if places is not None:
        place = tl.load(places + pair, mask=inside, other=0)
    column = tl.arange(0, COLUMNS)
    mask = inside[:, None] & (column[None, :] < WIDTH)
    values = tl.load(table + row[:, None] * WIDTH + column[None, :], mask=mask, other=0)
    if scale is not None:
        group = tl.arange(0, COLUMNS // 32)
        present = inside[:, None] & (group[None, :] < WIDTH // 32)
        codes = tl.load(scale + row[:, None] * (WIDTH // 32) + group[None, :], mask=present, other=0)
        numbers = tl.reshape(values.to(tl.float8e4nv, bitcast=True).to(tl.float32), (BLOCK, COLUMNS // 32, 32))
        values = tl.reshape(numbers * decode_e8m0(codes)[:, :, None], (BLOCK, COLUMNS))
    tl.store(out + place[:, None] * WIDTH + column[None, :], values.to(out.dtype.element_ty), mask=mask)
