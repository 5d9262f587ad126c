"""Write of compressed rows or index keys into a global cache, a block per token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import triton.language as tl

from v41c.codegen.cuda.frame import Frame
from v41c.codegen.cuda.kernel import CudaKernel
from v41c.codegen.cuda.language import jit
from v41c.codegen.cuda.packed_rows import write_row
from v41c.codegen.cuda.rows import power_of_two
from v41c.ir.formats import FORMATS
from v41c.ir.op import Op
from v41c.ir.types import DType, TensorType
from v41c.targets.cuda import CudaTarget


def kernel(
    op: Op,
    operands: Sequence[TensorType | None],
    results: Sequence[TensorType],
    target: CudaTarget,
    bounds: Mapping[str, int],
) -> CudaKernel:
    """x [T, K] into cache [S, C, row]: the rows of tokens that close a group, from kept on."""
    frame = Frame(op, operands, results, bounds)
    tokens, width = frame.type_of("x").shape
    cache = frame.type_of("cache")
    packed = cache.dtype == DType.U8
    name = str(op.attributes()["format"])
    group = FORMATS[name].group
    frame.launch(
        cache_write_token,
        {name: frame.operand(name) for name in ("cache", "x", "positions", "slots", "kept")}
        | {"C": frame.extent(cache.shape[1]), "RATIO": int(op.attributes()["ratio"]), "WIDTH": int(width)}
        | {"FORMAT": name if packed else None, "GROUP": group, "ROW": int(cache.shape[2])}
        | {"BLOCK": max(group, power_of_two(int(width)))},
        (frame.tiles(tokens),),
        # index keys have 128 elements: a group a warp
        warps=4 if int(width) > 128 else 1,
    )
    return frame.kernel()


@jit
def cache_write_token(
    cache: tl.tensor,
    x: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    kept: tl.tensor,
    C: tl.tensor,
    RATIO: tl.constexpr,
    WIDTH: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One token, which writes if it closes a group of RATIO and its row is not kept."""
    t = tl.program_id(0)
    position = tl.load(positions + t)
    if (position % RATIO == RATIO - 1) & (position >= tl.load(kept + t)):
        k = tl.arange(0, BLOCK)
        values = tl.load(x + t.to(tl.int64) * WIDTH + k, mask=k < WIDTH, other=0.0).to(tl.float32)
        row = tl.load(slots + t).to(tl.int64) * C + position // RATIO
        write_row(cache + row * ROW, values, FORMAT, GROUP, WIDTH, BLOCK)
