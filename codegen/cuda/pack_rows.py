"""Quantisation to a group-scaled format, kept packed: one block per row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import triton.language as tl

from v41c.codegen.cuda.frame import Frame
from v41c.codegen.cuda.kernel import CudaKernel
from v41c.codegen.cuda.language import jit
from v41c.codegen.cuda.packed_rows import write_row
from v41c.codegen.cuda.rows import power_of_two
from v41c.ir.formats import FORMATS
from v41c.ir.ops.pack_rows import PackRows
from v41c.ir.types import TensorType
from v41c.targets.cuda import CudaTarget


def kernel(
    op: PackRows,
    operands: Sequence[TensorType | None],
    results: Sequence[TensorType],
    target: CudaTarget,
    bounds: Mapping[str, int],
) -> CudaKernel:
    """x bf16 or f32 [T, K] to u8 [T, row bytes]."""
    frame = Frame(op, operands, results, bounds)
    tokens, width = frame.type_of("x").shape
    group, block = FORMATS[op.format].group, power_of_two(int(width))
    frame.launch(
        pack_row,
        {"x": frame.operand("x"), "y": frame.result(0), "FORMAT": op.format, "GROUP": group}
        | {"K": int(width), "ROW": int(results[0].shape[1]), "BLOCK": block},
        (frame.tiles(tokens),),
        warps=8,
    )
    return frame.kernel()


@jit
def pack_row(
    x: tl.tensor,
    y: tl.tensor,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """A row of K elements."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    values = tl.load(x + row * K + k, mask=k < K, other=0.0).to(tl.float32)
    write_row(y + row * ROW, values, FORMAT, GROUP, K, BLOCK)
