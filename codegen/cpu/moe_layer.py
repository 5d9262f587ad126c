"""Routed experts, shared expert and their sum in one launch.

A single token takes both in the same two loops over threads. A chunk takes them one after the other; the sum of the
routed experts then waits in the workspace for the shared expert's last product.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from v41c.codegen.cpu import gemv, packed, tir
from v41c.codegen.cpu.frame import Body, bound_of, build_kernel
from v41c.codegen.cpu.moe_experts import Experts, activate, check_widths
from v41c.codegen.cpu.product import Product, launch, matrix_of, share, weight_layouts
from v41c.codegen.cpu.sparse import Types, required
from v41c.codegen.cpu.tir import LANES, Buffer, Expr
from v41c.codegen.kernel import CpuKernel
from v41c.ir.ops.moe_experts import MoeExperts
from v41c.ir.ops.moe_layer import MoeLayer
from v41c.ir.types import TensorType

if TYPE_CHECKING:
    from v41c.targets.target import CpuTarget

#: operand numbers: the routed stacks, the shared input and weights, and the scales of both
_STACKS, _SHARED_X, _SHARED, _SCALES = (3, 4, 5), 6, (7, 8, 9), 7


def kernel(
    op: MoeLayer, operands: Types, results: tuple[TensorType, ...], target: CpuTarget, bounds: Mapping[str, int]
) -> CpuKernel:
    """The kernel."""
    x, ids = required(operands, 0, 1)
    stacks, shared = required(operands, *_STACKS), required(operands, *_SHARED)
    check_widths(op, stacks[0], op.format, target)
    check_widths(op, shared[0], op.shared_format, target)
    tokens, chosen, count = bound_of(x.shape[0], bounds), int(ids.shape[1]), int(stacks[0].shape[0])
    inner, width = (int(dim) for dim in shared[0].shape)
    layouts: dict[int, str] = {}
    for number, kind in zip((*_STACKS, *_SHARED), (*stacks, *shared), strict=True):
        scale = number + _SCALES - (1 if number > _SHARED_X else 0)
        layouts |= weight_layouts(op, kind, target, number, scale)
    #: first words of the sums of the routed experts and of the shared expert's hidden activations
    sums = -(-Experts.words(tokens, count, chosen, int(stacks[0].shape[1])) // LANES) * LANES
    hidden = sums + (-(-tokens * width // LANES) * LANES if tokens > 1 else 0)

    def emit(body: Body) -> None:
        scales = body.operands[_SHARED[-1] + 1 :]
        weights = [
            matrix_of(kind, body.operands[i], scale, target)
            for i, kind, scale in zip(_STACKS, stacks, scales[:3], strict=True)
        ]
        routed = Experts(MoeExperts(op.limit, op.format), body, weights, (tokens, count, chosen), (body.words, sums))
        w1, w3, w2 = (
            matrix_of(kind, body.operands[i], scale, target)
            for i, kind, scale in zip(_SHARED, shared, scales[3:], strict=True)
        )
        first = _Hidden(op, [w1, w3], body.operands[_SHARED_X], body.words, (0, hidden))
        last = _Output(op, w2, body, routed, hidden)
        size = body.size(x.shape[0])
        if tokens > 1:
            routed.emit(size)
            launch([first], size, tokens)
            launch([last], size, tokens)
            return
        # a third of the routed experts' work is in their last product
        with tir.loop(size) as token:
            share([routed.hidden_tasks(token), first.token_tasks(token)], routed.work * 2 // 3 + first.work(1))
            share([last.token_tasks(token)], routed.work // 3 + last.work(1))

    data = {i: packed.WORDS[kind.dtype] for i, kind in zip((*_STACKS, *_SHARED), (*stacks, *shared), strict=True)}
    words = hidden + max(1, tokens) * inner
    return build_kernel(emit, op, operands, results, bounds, scratch_words=words, layouts=layouts, storage=data)


class _Hidden(Product):
    """The shared expert's activation, from its first two products."""

    def __init__(
        self, op: MoeLayer, weights: Sequence[packed.Weight], x: Buffer, out: Buffer, starts: tuple[Expr, Expr]
    ) -> None:
        super().__init__(weights, x, out, format=op.shared_format, starts=starts)
        self.op = op

    def finish(self, row: Expr, panel: Expr, sums: list[list[Expr]]) -> list[Expr]:
        gates, ups = sums
        return activate(gates, ups, None, self.op.limit, self.op.out == "bf16", self.op.shared_format)


class _Output(Product):
    """The shared expert's last product and the sum of the routed experts, which a single token computes here."""

    def __init__(self, op: MoeLayer, weight: packed.Weight, body: Body, routed: Experts, hidden: int) -> None:
        super().__init__([weight], body.words, body.results[0], starts=(hidden, 0))
        self.rounded, self.routed = op.out == "bf16", routed

    def finish(self, row: Expr, panel: Expr, sums: list[list[Expr]]) -> list[Expr]:
        ((value,),) = sums
        first = self.routed.out_start + row * self.routed.width + panel * LANES
        return [tir.load(self.routed.out, first) + self._round(value)]

    def _round(self, value: Expr) -> Expr:
        return tir.let(tir.bf16(value) if self.rounded else value)

    def _strip(self, x: Buffer, row: Expr, group: Expr, strip: Expr, width: int) -> None:
        (weight,) = self.weights
        totals = self.routed.totals(row, strip, width)
        values = gemv.dot(weight, weight.strip_of(group, strip, width), x)
        for j, (total, value) in enumerate(zip(totals, values, strict=True)):
            panel = strip * weight.strip + j
            packed.store_panel(self.out, row * weight.rows, panel, weight.rows, total.value + self._round(value))
