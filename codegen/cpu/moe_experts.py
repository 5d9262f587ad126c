"""The routed experts: gate and up products, activation, down product, summed per token (`ir.ops.moe_experts`).

Few tokens take their experts one after another, reading each weight straight into multiply-adds. Many are sorted by
expert first, and every expert multiplies all its rows at once. Both give the same bits: each product is one chain
over k, and a token's outputs are added in ascending expert order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from tvm.script.ir_builder import tirx as T

from v41c.codegen.cpu import gemm, gemv, numeric, packed, quantize, tir
from v41c.codegen.cpu.frame import Body, bound_of, build_kernel
from v41c.codegen.cpu.product import Tasks, matrix_of, share, weight_layouts
from v41c.codegen.cpu.sparse import Types, array, required
from v41c.codegen.cpu.tir import LANES, Buffer, Expr, Local
from v41c.codegen.kernel import CpuKernel
from v41c.errors import UnsupportedError
from v41c.ir import formats
from v41c.ir.types import DType, TensorType

if TYPE_CHECKING:
    from v41c.ir.op import Op
    from v41c.ir.ops.moe_experts import MoeExperts
    from v41c.targets.target import CpuTarget


def kernel(
    op: MoeExperts, operands: Types, results: tuple[TensorType, ...], target: CpuTarget, bounds: Mapping[str, int]
) -> CpuKernel:
    """out f32 [T, D] of x [T, D], ids and weights [T, k], stacks w1, w3 [E, M, D] and w2 [E, D, M]."""
    x, ids, *stacks = required(operands, 0, 1, 3, 4, 5)
    check_widths(op, stacks[0], op.format, target)
    tokens, chosen = bound_of(x.shape[0], bounds), int(ids.shape[1])
    layouts: dict[int, str] = {}
    for number, kind in enumerate(stacks):
        layouts |= weight_layouts(op, kind, target, 3 + number, 6 + number)

    def emit(body: Body) -> None:
        weights = [matrix_of(kind, body.operands[3 + i], body.operands[6 + i], target) for i, kind in enumerate(stacks)]
        experts = Experts(op, body, weights, (tokens, int(stacks[0].shape[0]), chosen), (body.results[0], 0))
        experts.emit(body.size(x.shape[0]))

    words = packed.WORDS[stacks[0].dtype]
    return build_kernel(
        emit,
        op,
        operands,
        results,
        bounds,
        scratch_words=Experts.words(tokens, int(stacks[0].shape[0]), chosen, int(stacks[0].shape[1])),
        layouts=layouts,
        storage={3: words, 4: words, 5: words},
    )


def check_widths(op: Op, w1: TensorType, format: str, target: CpuTarget) -> None:
    """UnsupportedError for experts whose widths are not whole groups of their formats."""
    inner, width = (int(dim) for dim in w1.shape[-2:])
    quantized = w1.dtype in (DType.F8E4M3, DType.F4E2M1)
    group = formats.FORMATS[format].group if format != "none" else 1
    if (quantized and (inner % 32 or width % 32)) or inner % group:
        wanted = "widths that are multiples of 32"
        raise UnsupportedError(f"{op.name()} on {target.name}: {w1}: expected {wanted}, got M {inner}, D {width}")


def activate(
    gates: list[Expr], ups: list[Expr], gain: Expr | None, limit: float, rounded: bool, format: str
) -> list[Expr]:
    """The input of an expert's last product from whole groups of 16 outputs of the first two.

    `rounded`: the products, and what is made of them, are bf16. Without a `gain` the activation is not weighed.
    """

    def value_of(value: Expr) -> Expr:
        return tir.let(tir.bf16(value) if rounded else value)

    hidden = []
    for gate, up in zip(gates, ups, strict=True):
        g = tir.let(tir.minimum(tir.const(limit, LANES), value_of(gate)))
        v = tir.let(numeric.clamp(value_of(up), limit))
        value = tir.product(numeric.silu(g), v)
        hidden.append(value_of(value if gain is None else tir.product(value, tir.splat(gain, LANES))))
    if format == "none":
        return hidden
    kind = formats.FORMATS[format]
    each = kind.group // LANES
    groups = [hidden[i : i + each] for i in range(0, len(hidden), each)]
    return [tir.let(value) for group in groups for value in quantize.round_trip(group, kind)]


def _table_words(experts: int, pairs: int) -> int:
    """Workspace words of the dispatch tables: first place of each expert and its end, cursors, pairs by place."""
    return -(-(2 * experts + 1 + pairs) // LANES) * LANES


class Experts:
    """The routed experts of every token; `sizes` are tokens at most, experts, and experts that a token chooses.

    The sum goes to the f32 buffer `out[0]` from element `out[1]` on. Tables and hidden activations are the first
    `words` of the workspace.
    """

    def __init__(
        self,
        op: MoeExperts,
        body: Body,
        weights: Sequence[packed.Weight],
        sizes: tuple[int, int, int],
        out: tuple[Buffer, int],
    ) -> None:
        self.op = op
        self.tokens, self.experts, self.chosen = sizes
        self.x, self.ids, self.gains = body.operands[:3]
        self.w1, self.w3, self.w2 = weights
        self.inner, self.width = self.w1.rows, self.w1.columns
        self.out, self.out_start = out
        self.bf16 = self.x.dtype == "uint16"
        self.table, self.hidden = body.integers, body.words
        self.hidden_start = _table_words(self.experts, self.tokens * self.chosen) if self.tokens > 1 else 0
        self.work = max(1, self.tokens) * self.chosen * 3 * self.inner * self.width

    @staticmethod
    def words(tokens: int, experts: int, chosen: int, inner: int) -> int:
        """Words of workspace."""
        tables = _table_words(experts, tokens * chosen) if tokens > 1 else 0
        return max(1, tokens) * chosen * inner + tables

    def emit(self, count: Expr) -> None:
        """Both ways, chosen by the number of tokens; a kernel for single tokens has only the first."""
        self.count = count
        if self.tokens <= 1:
            self._one_by_one()
            return
        # one by one reads a weight again for each token that wants it; sorting pays once a quarter or so are shared:
        # measured at 16 experts, 4 chosen, three tokens take 5 % less and four 13 %
        alone = tir.select(self.count <= 1, tir.i64(1), tir.i64(0))
        few = tir.let(tir.select(self.count * self.chosen * 2 <= self.experts, tir.i64(1), alone))
        with tir.when(few == 1):
            self._one_by_one()
        with tir.when(few == 0):
            self._by_expert()

    def _rounded(self, value: Expr) -> Expr:
        return tir.bf16(value) if self.bf16 else value

    def _activate(self, gates: list[Expr], ups: list[Expr], gain: Expr) -> list[Expr]:
        return activate(gates, ups, gain, self.op.limit, self.bf16, self.op.format)

    def _hidden_at(self, place: Expr) -> Expr:
        """Index of row `place` of the hidden activations."""
        return place * self.inner + self.hidden_start

    # -- few tokens ----------------------------------------------------------------------------------------------------

    def _one_by_one(self) -> None:
        with tir.loop(self.count) as token:
            share([self.hidden_tasks(token)], self.work)
            with tir.parallel(self.w2.strips, self.work) as strip:
                packed.at_strip(self.w2, strip, partial(self._output_strip, token, strip))

    def hidden_tasks(self, token: Expr) -> Tasks:
        """The hidden activations of a token's experts."""
        first = tir.let(token * self.chosen)
        x = gemv.widen_row(self._source, token, self.width)

        def run(task: Expr) -> None:
            place, strip = tir.let(first + task // self.w1.strips), tir.let(task % self.w1.strips)
            packed.at_strip(self.w1, strip, partial(self._hidden_strip, x, first, place, strip))

        return self.chosen * self.w1.strips, run

    def _source(self, row: Expr, index: Expr, lanes: int) -> Expr:
        return tir.load(self.x, row * self.width + index, lanes)

    def _hidden_strip(self, x: Buffer, first: Expr, place: Expr, strip: Expr, width: int) -> None:
        expert = tir.let(tir.i64(self.ids[place]))
        # one weight after the other: a thread streams best from one place
        gates, ups = (gemv.dot(w, w.strip_of(expert, strip, width), x) for w in (self.w1, self.w3))
        hidden = self._activate(gates, ups, self.gains[place])
        for j, value in enumerate(hidden):
            panel = strip * self.w1.strip + j
            packed.store_panel(self.hidden, self._hidden_at(place - first), panel, self.inner, value)

    def _output_strip(self, token: Expr, strip: Expr, width: int) -> None:
        for j, total in enumerate(self.totals(token, strip, width)):
            packed.store_panel(self.out, self._out_at(token), strip * self.w2.strip + j, self.width, total.value)

    def totals(self, token: Expr, strip: Expr, width: int) -> list[Local]:
        """The sums over a token's experts at a strip of outputs, from its hidden activations."""
        totals = [tir.local(tir.const(0.0, LANES)) for _ in range(width)]
        order = self._ascending(token)
        with tir.loop(self.chosen) as i:
            j = tir.let(tir.i64(order[i]))
            place = tir.let(token * self.chosen + j)
            expert, start = tir.let(tir.i64(self.ids[place])), tir.let(self._hidden_at(j))

            def source(row: Expr, index: Expr, lanes: int) -> Expr:
                return tir.load(self.hidden, start + index, lanes)

            x = gemv.widen_row(source, place, self.inner)
            for total, value in zip(totals, gemv.dot(self.w2, self.w2.strip_of(expert, strip, width), x), strict=True):
                total.set(total.value + tir.let(self._rounded(value)))
        return totals

    def _ascending(self, token: Expr) -> Buffer:
        """Which of a token's choices is its i-th expert: outputs add up in the order of the experts."""
        order, first = array(self.chosen, "int32"), tir.let(token * self.chosen)
        with tir.loop(self.chosen) as j:
            expert, rank = tir.let(self.ids[first + j]), tir.local(T.int32(0))
            with tir.loop(self.chosen) as other:
                rank.set(rank.value + tir.cast(self.ids[first + other] < expert, "int32"))
            tir.put(order, tir.i64(rank.value), tir.cast(j, "int32"))
        return order

    def _out_at(self, token: Expr) -> Expr:
        """Index of a token's sum."""
        return token * self.width + self.out_start

    # -- many tokens ---------------------------------------------------------------------------------------------------

    def _by_expert(self) -> None:
        self._sort()
        streams = [self.w1, self.w3]
        # rows of an expert: all of them in the worst case, about its share in the usual one
        rows = min(self.tokens, -(-2 * self.tokens * self.chosen // self.experts))
        sizes = gemm.tiling(self.w1, rows, self.experts, len(streams))
        stretches = -(-self.w1.strips // sizes.task_strips)
        with tir.parallel(self.experts * stretches, self.work) as task:
            expert, first = tir.let(task // stretches), tir.let(task % stretches * sizes.task_strips)
            tile = gemm.Tile(sizes, streams, often_fewer=True)
            self._blocks(tile, expert, first, self._token_rows, self._store_hidden)
        sizes = gemm.tiling(self.w2, rows)
        with tir.parallel(-(-self.w2.strips // sizes.task_strips), self.work) as task:
            first = tir.let(task * sizes.task_strips)
            self._clear(first, sizes.task_strips)
            tile = gemm.Tile(sizes, [self.w2], often_fewer=True)
            # ascending, so that each token's outputs add up in the order of its experts
            with tir.loop(self.experts) as expert:
                self._blocks(tile, expert, first, self._hidden_rows, self._add_output)

    def _sort(self) -> None:
        """Tables: starts of the experts' places, then cursors that end as their ends, then the pairs by place."""
        table, experts = self.table, self.experts
        pairs = tir.let(self.count * self.chosen)
        with tir.loop(2 * experts + 1) as i:
            tir.put(table, i, T.int32(0))
        with tir.loop(pairs) as pair:
            slot = tir.let(tir.i64(self.ids[pair]) + 1)
            tir.put(table, slot, table[slot] + 1)
        with tir.loop(experts) as expert:
            start = tir.let(table[expert])
            tir.put(table, expert + 1, table[expert + 1] + start)
            tir.put(table, experts + 1 + expert, start)
        with tir.loop(pairs) as pair:
            cursor = tir.let(tir.i64(self.ids[pair]) + (experts + 1))
            place = tir.let(table[cursor])
            tir.put(table, tir.i64(place) + (2 * experts + 1), tir.cast(pair, "int32"))
            tir.put(table, cursor, place + 1)

    def _pair_at(self, place: Expr) -> Expr:
        return tir.i64(self.table[place + (2 * self.experts + 1)])

    def _blocks(self, tile: gemm.Tile, expert: Expr, first: Expr, rows: _Rows, finish: _Finish) -> None:
        """The product of all rows of an expert with a task's panels, block by block."""
        weight = tile.weights[0]
        start = tir.let(tir.i64(self.table[expert]))
        end = tir.let(tir.i64(self.table[expert + 1]))
        strips = tir.let(tir.minimum(tir.i64(tile.sizes.task_strips), tir.i64(weight.strips) - first))
        panels = packed.task_panels(weight, first, strips)
        step = tile.sizes.task_rows
        with tir.loop((end - start + (step - 1)) // step) as block:
            base = tir.let(start + block * step)
            count = tir.let(tir.minimum(tir.i64(step), end - base))
            tile.run(count, partial(rows, base), expert, first, strips)
            with tir.loop(count) as row:
                finish(tile, row, tir.let(base + row), tir.let(first * weight.strip), panels)

    def _token_rows(self, base: Expr, row: Expr, index: Expr, lanes: int) -> Expr:
        token = self._pair_at(base + row) // self.chosen
        return tir.load(self.x, token * self.width + index, lanes)

    def _hidden_rows(self, base: Expr, row: Expr, index: Expr, lanes: int) -> Expr:
        return tir.load(self.hidden, self._hidden_at(base + row) + index, lanes)

    def _store_hidden(self, tile: gemm.Tile, row: Expr, place: Expr, first: Expr, panels: Expr) -> None:
        gain = tir.let(self.gains[self._pair_at(place)])
        # a group of the round trip at a time; tiles take whole ones
        each = 1 if self.op.format == "none" else formats.FORMATS[self.op.format].group // LANES
        with tir.loop(panels // each) as unit:
            base = tir.let(unit * (2 * each))
            gates, ups = ([tile.value(row, base + 2 * j + s) for j in range(each)] for s in range(2))
            for j, value in enumerate(self._activate(gates, ups, gain)):
                panel = first + unit * each + j
                packed.store_panel(self.hidden, self._hidden_at(place), panel, self.inner, value)

    def _add_output(self, tile: gemm.Tile, row: Expr, place: Expr, first: Expr, panels: Expr) -> None:
        base = tir.let(self._out_at(self._pair_at(place) // self.chosen))
        with tir.loop(panels) as j:
            value = tir.let(self._rounded(tile.value(row, j)))
            packed.add_panel(self.out, base, first + j, self.width, value)

    def _clear(self, first: Expr, strips: int) -> None:
        panels = packed.task_panels(self.w2, first, tir.i64(strips))
        with tir.loop(self.count) as token, tir.loop(panels) as j:
            zero = tir.const(0.0, LANES)
            packed.store_panel(self.out, self._out_at(token), first * self.w2.strip + j, self.width, zero)


_Rows = Callable[[Expr, Expr, Expr, int], Expr]
_Finish = Callable[[gemm.Tile, Expr, Expr, Expr, Expr], None]
