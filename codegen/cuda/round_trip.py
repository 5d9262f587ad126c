"""Quantisation to a group-scaled format and back, one block per few groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import triton.language as tl

from v41c.codegen.cuda.frame import Frame
from v41c.codegen.cuda.kernel import CudaKernel
from v41c.codegen.cuda.language import jit
from v41c.codegen.cuda.numeric import round_groups
from v41c.ir.formats import FORMATS
from v41c.ir.op import Op
from v41c.ir.types import TensorType
from v41c.targets.cuda import CudaTarget

#: elements of a block: 8 a thread, which a 16-byte access of bf16 holds
_BLOCK = 1024


def kernel(
    op: Op,
    operands: Sequence[TensorType | None],
    results: Sequence[TensorType],
    target: CudaTarget,
    bounds: Mapping[str, int],
) -> CudaKernel:
    """x bf16 or f32 [T, …, K] to the same type."""
    frame = Frame(op, operands, results, bounds)
    tokens, *inner = frame.type_of("x").shape
    row = 1
    for size in inner:
        row *= int(size)
    name = str(op.attributes()["format"])
    blocks = -(-row // _BLOCK)
    frame.launch(
        round_trip_rows,
        {"x": frame.operand("x"), "y": frame.result(0), "K": row, "BLOCK": _BLOCK, "GROUP": FORMATS[name].group}
        | {"FORMAT": name},
        (frame.tiles(tokens), blocks),
    )
    return frame.kernel()


@jit
def round_trip_rows(
    x: tl.tensor, y: tl.tensor, K: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, FORMAT: tl.constexpr
) -> None:
    """A block of a row of K elements."""
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    offset = tl.program_id(0).to(tl.int64) * K + place
    values = tl.load(x + offset, mask=place < K, other=0.0).to(tl.float32)
    rounded = tl.reshape(round_groups(tl.reshape(values, (BLOCK // GROUP, GROUP)), FORMAT), (BLOCK,))
    tl.store(y + offset, rounded.to(y.dtype.element_ty), mask=place < K)
