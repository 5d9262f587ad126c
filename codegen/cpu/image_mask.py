"""Which tokens belong to an image span."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tvm.script.ir_builder import tirx as T

from v41c.codegen.cpu.frame import Body, build_kernel
from v41c.codegen.cpu.sparse import Types, required
from v41c.codegen.cpu.tir import cast, loop, put
from v41c.codegen.kernel import CpuKernel
from v41c.ir.ops.image_mask import ImageMask
from v41c.ir.types import TensorType

if TYPE_CHECKING:
    from v41c.targets.target import CpuTarget


def kernel(
    op: ImageMask, operands: Types, results: tuple[TensorType, ...], target: CpuTarget, bounds: Mapping[str, int]
) -> CpuKernel:
    """The kernel."""
    (kind,) = required(operands, 0)

    def emit(body: Body) -> None:
        (tokens,), (out,) = body.operands, body.results
        with loop(body.size(kind.shape[0])) as token:
            put(out, token, cast(T.EQ(tokens[token], T.int32(op.image_token)), "uint8"))

    return build_kernel(emit, op, operands, results, bounds)
