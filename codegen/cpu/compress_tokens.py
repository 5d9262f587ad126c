"""Token ids in the Engram's smaller id space."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tvm.script.ir_builder import tirx as T

from v41c.codegen.cpu.frame import Body, build_kernel
from v41c.codegen.cpu.sparse import Types, required
from v41c.codegen.cpu.tir import cast, let, loop, put
from v41c.codegen.kernel import CpuKernel
from v41c.ir.ops.compress_tokens import CompressTokens
from v41c.ir.types import TensorType

if TYPE_CHECKING:
    from v41c.targets.target import CpuTarget


def kernel(
    op: CompressTokens, operands: Types, results: tuple[TensorType, ...], target: CpuTarget, bounds: Mapping[str, int]
) -> CpuKernel:
    """The kernel."""
    (kind,) = required(operands, 0)

    def emit(body: Body) -> None:
        (tokens, table), (out,) = body.operands, body.results
        with loop(body.size(kind.shape[0])) as row:
            token = let(tokens[row])
            image = token == op.image_token
            put(out, row, T.if_then_else(image, T.int32(-1), table[cast(token, "int64")]))

    return build_kernel(emit, op, operands, results, bounds)
