"""Token embedding: one table row per token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from v41c.codegen.cuda.frame import Frame
from v41c.codegen.cuda.gather_rows import gather_blocks
from v41c.codegen.cuda.kernel import CudaKernel
from v41c.codegen.cuda.rows import row_blocks
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
    """tokens [T] and table [V, D] to [T, D]."""
    frame = Frame(op, operands, results, bounds)
    width = int(frame.type_of("table").shape[1])
    blocks = row_blocks(frame, frame.type_of("tokens").shape[0], width)
    frame.launch(
        gather_blocks,
        {"x": frame.operand("table"), "rows": frame.operand("tokens"), "out": frame.result(0)}
        | {"WIDTH": width, "BLOCK": blocks.columns},
        blocks.grid,
        warps=blocks.warps,
    )
    return frame.kernel()
