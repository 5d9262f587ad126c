"""The router: a narrow product whose logits stay in the workspace, and the choice among them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from v41c.codegen.cpu import packed
from v41c.codegen.cpu.frame import Body, bound_of, build_kernel
from v41c.codegen.cpu.product import Product, launch, matrix_of, weight_layouts
from v41c.codegen.cpu.route import choose
from v41c.codegen.cpu.sparse import Types, required
from v41c.codegen.kernel import CpuKernel
from v41c.ir.ops.gate import Gate
from v41c.ir.types import TensorType

if TYPE_CHECKING:
    from v41c.targets.target import CpuTarget


def kernel(
    op: Gate, operands: Types, results: tuple[TensorType, ...], target: CpuTarget, bounds: Mapping[str, int]
) -> CpuKernel:
    """The kernel."""
    x, weight = required(operands, 0, 1)
    count, bound = int(weight.shape[0]), bound_of(x.shape[0], bounds)

    def emit(body: Body) -> None:
        matrix = matrix_of(weight, body.operands[1], None, target)
        tokens = body.size(x.shape[0])
        launch([Product([matrix], body.operands[0], body.words)], tokens, bound)
        choose(op.route, [body.words, *body.operands[2:]], body.results, count, tokens, bound)

    return build_kernel(
        emit,
        op,
        operands,
        results,
        bounds,
        scratch_words=max(1, bound) * count,
        layouts=weight_layouts(op, weight, target, 1, -1),
        storage={1: packed.WORDS[weight.dtype]},
    )
