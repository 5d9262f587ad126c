"""Attention over window and selected rows.

Rows are dequantised to f32 in blocks of 64 entries. Scores have sixteen heads in the lanes, so that the softmax needs
no sums across lanes; the value product has head width in the lanes. Every score is one chain over the head width and
every output one chain over the entries, in order: a token's result has the same bits in every schedule.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tvm.script.ir_builder import tirx as T

from v41c.codegen.cpu.attention_entries import Entries
from v41c.codegen.cpu.frame import Body, bound_of, build_kernel
from v41c.codegen.cpu.numeric import (
    exp,
)
from v41c.codegen.cpu.sparse import Types, array, broadcast, registers, required, transpose_words
from v41c.codegen.cpu.tir import (
    LANES,
    Buffer,
    Expr,
    at,
    bf16,
    bits,
    cast,
    const,
    fma,
    from_bits,
    i64,
    let,
    load,
    local,
    loop,
    maximum,
    parallel,
    put,
    store,
    when,
)
from v41c.codegen.kernel import CpuKernel
from v41c.ir.ops.attention import BLOCK, Attention
from v41c.ir.types import DType, TensorType

if TYPE_CHECKING:
    from v41c.targets.target import CpuTarget

#: f32 rows: their buffer, index of the first, elements from one to the next
Rows = tuple[Buffer, Expr, int]
TASKS = 32  # tasks of a step of many tokens: enough to balance, few enough to keep scratch small
PARALLEL_READ = 1 << 17  # elements of one token's rows that are worth dequantising in parallel


def kernel(
    op: Attention, operands: Types, results: tuple[TensorType, ...], target: CpuTarget, bounds: Mapping[str, int]
) -> CpuKernel:
    """The kernel."""
    plan = Plan(op, operands, bounds, target)
    return build_kernel(plan.emit, op, operands, results, bounds, scratch_words=plan.words)


class Plan:
    """Shapes, scratch and loops of one kernel. Offsets are in words from the start of a task's scratch."""

    #: where a token's entries come from
    entries: type[Entries] = Entries

    def __init__(self, op: Attention, operands: Types, bounds: Mapping[str, int], target: CpuTarget) -> None:
        q, window = required(operands, 0, 3)
        self._op, self._types, self._target = op, operands, target
        self._rounded = q.dtype == DType.BF16
        self._heads, self._width = int(q.shape[1]), int(q.shape[2])
        self._groups = -(-self._heads // LANES)
        self._stride = self._width + LANES  # of f32 rows: spreads them over the sets of the cache
        self._tokens = q.shape[0]
        tokens = bound_of(self._tokens, bounds)
        selected = 0 if operands[9] is None else int(operands[9].shape[1])
        self._single = tokens <= 1
        #: entries of a token at most: window, run (of a draft block), selection
        entries = int(window.shape[1]) + (0 if op.causal else tokens) + selected
        self._entries = -(-entries // BLOCK) * BLOCK
        groups = 1 if self._single else self._groups
        self._q = BLOCK * LANES
        self._acc = self._q + groups * self._width * LANES
        self._state = self._acc + groups * LANES * self._stride
        self._chosen = self._state + groups * 2 * LANES
        self._rows = self._chosen + -(-selected // LANES) * LANES
        if self._single:
            # one token: the groups of heads are the tasks and share its rows
            self._task = self._chosen
            self._chosen = self._groups * self._task
            self._rows = self._chosen + -(-selected // LANES) * LANES
            self.words = self._rows + self._entries * self._stride
        else:
            self._task = self._rows + BLOCK * self._stride
            self.words = self._task * TASKS

    def emit(self, body: Body) -> None:
        """Emit the loops over tokens and groups of heads."""
        tokens = let(body.size(self._tokens))
        if self._single:
            with loop(tokens) as token:
                self._one_token(body, token)
            return
        # few tokens: a group of heads is a task, and dequantises for itself
        few = tokens * self._groups <= TASKS
        split = let(T.Select(few, i64(self._groups), i64(1)))
        tasks = let(T.min(tokens * split, i64(TASKS)))
        stride = let(tasks // split)
        share = let(i64(self._groups) // split)
        with parallel(tasks) as task:
            base = let(task * self._task)
            first_group = let(task % split * share)
            token = local(task // split)
            with T.While(token.value < tokens):
                entries = self.entries(body, self._op, self._types, token.value, self._target)
                entries.choose(base + self._chosen)
                with loop(share) as group:
                    self._begin(body, token.value, first_group + group, base, group)
                with loop((entries.count.value + (BLOCK - 1)) // i64(BLOCK)) as block:
                    size = let(T.min(entries.count.value - block * BLOCK, i64(BLOCK)))
                    with loop(size) as entry:
                        entries.read(block * BLOCK + entry, base + self._rows + entry * self._stride)
                    with loop(share) as group:
                        rows = (body.words, base + self._rows, self._stride)
                        self._attend(body, first_group + group, base, group, rows, size)
                with loop(share) as group:
                    self._finish(body, token.value, first_group + group, base, group, entries.count.value)
                token.set(token.value + stride)

    def _one_token(self, body: Body, token: Expr) -> None:
        entries = self.entries(body, self._op, self._types, token, self._target)
        entries.choose(i64(self._chosen))
        work = self._entries * self._width // 4
        with parallel(entries.count.value, work) as entry, entries.unless_direct(entry):
            entries.read(entry, self._rows + entry * self._stride)
        work = 2 * self._entries * self._width * LANES if self._groups > 1 else 0
        with parallel(self._groups, work) as group:
            base = let(group * self._task)
            zero = T.int64(0)
            self._begin(body, token, group, base, zero)
            with loop((entries.count.value + (BLOCK - 1)) // i64(BLOCK)) as block:
                size = let(T.min(entries.count.value - block * BLOCK, i64(BLOCK)))
                self._block(body, entries, block, size, (group, base, zero))
            self._finish(body, token, group, base, zero, entries.count.value)

    def _block(self, body: Body, entries: Entries, block: Expr, size: Expr, task: tuple[Expr, Expr, Expr]) -> None:
        """A block of the only token's entries: from the scratch, or from where they lie."""
        copied = (body.words, self._rows + block * (BLOCK * self._stride), self._stride)
        if entries.direct is None:
            self._attend(body, *task, copied, size)
            return
        direct = let(cast(entries.is_direct(block * BLOCK), "int32"))
        with when(direct == 0):
            self._attend(body, *task, copied, size)
        with when(direct == 1):
            self._attend(body, *task, (entries.direct, entries.place_of(block * BLOCK), entries.stride), size)

    def _begin(self, body: Body, token: Expr, group: Expr, base: Expr, place: Expr) -> None:
        """Transpose the queries of a group, in the last one repeating the last head, and clear its state."""
        words, q = body.words, body.operands[0]
        target = let(base + self._q + place * (self._width * LANES))
        heads = [let(T.min(group * LANES + lane, i64(self._heads - 1))) for lane in range(LANES)]
        starts = [let((token * self._heads + head) * self._width) for head in heads]
        with loop(self._width // 4) as quad:
            rows = [let(bits(load(q, start + quad * 4, 4))) for start in starts]
            for word, vector in enumerate(transpose_words(rows)):
                put(words, target + (quad * 4 + word) * LANES, from_bits(vector))
        acc = let(base + self._acc + place * (LANES * self._stride))
        with loop(self._stride) as i:
            put(words, acc + i * LANES, const(0.0, LANES))
        state = let(base + self._state + place * (2 * LANES))
        put(words, state, T.broadcast(T.float32(float("-inf")), LANES))
        put(words, state + LANES, const(0.0, LANES))

    def _attend(self, body: Body, group: Expr, base: Expr, place: Expr, rows: Rows, size: Expr) -> None:
        """One block of entries for one group of heads."""
        source, first, stride = rows
        first = let(first)
        self._score(body, base, place, (source, first, stride), size)
        decay = array(LANES)
        self._softmax(body, base, place, size, decay)
        heads = let(T.min(i64(self._heads) - group * LANES, i64(LANES)))
        acc = let(base + self._acc + place * (LANES * self._stride))
        step = 4 * LANES if self._target.has_avx512 else LANES
        whole = self._width // step
        with loop(whole) as chunk:
            part = (source, first + chunk * step, stride)
            self._add_values(body, base, part, acc + chunk * step, heads, size, decay, step // LANES)
        rest = self._width - whole * step
        if rest:
            done = whole * step
            part = (source, first + done, stride)
            self._add_values(body, base, part, acc + done, heads, size, decay, rest // LANES)

    def _score(self, body: Body, base: Expr, place: Expr, rows: Rows, size: Expr) -> None:
        """scale · q · k, [entry, head]; entries beyond `size` in the last step are computed and not used."""
        words, (source, row, stride) = body.words, rows
        step = 16 if self._target.has_avx512 else 4
        q = let(base + self._q + place * (self._width * LANES))
        with loop((size + (step - 1)) // i64(step)) as part:
            first = let(row + part * (step * stride))
            totals = registers(step)
            with loop(self._width) as d:
                query = let(words[at(q + d * LANES, LANES)])
                for entry, total in enumerate(totals):
                    total.set(fma(broadcast(source, first + d + entry * stride), query, total.value))
            for entry, total in enumerate(totals):
                put(words, base + (part * step + entry) * LANES, total.value * const(self._op.scale, LANES))

    def _softmax(self, body: Body, base: Expr, place: Expr, size: Expr, decay: Expr) -> None:
        """Scores to probabilities in place, against the running maximum; the factor for what was summed before."""
        words = body.words
        state = let(base + self._state + place * (2 * LANES))
        old = let(words[at(state, LANES)])
        new = local(old)
        with loop(size) as entry:
            new.set(maximum(words[at(base + entry * LANES, LANES)], new.value))
        total = local(const(0.0, LANES))
        with loop(size) as entry:
            p = let(exp(words[at(base + entry * LANES, LANES)] - new.value))
            total.set(total.value + p)
            put(words, base + entry * LANES, bf16(p) if self._rounded else p)
        factor = let(exp(old - new.value))
        put(decay, i64(0), factor)
        put(words, state, new.value)
        put(words, state + LANES, fma(words[at(state + LANES, LANES)], factor, total.value))

    def _add_values(
        self, body: Body, base: Expr, rows: Rows, acc: Expr, heads: Expr, size: Expr, decay: Expr, vectors: int
    ) -> None:
        """acc = acc · decay + p · rows, four heads at a time, on `vectors` vectors of the head width."""
        words, (source, begin, stride) = body.words, rows
        begin, acc, quad = let(begin), let(acc), 4
        with loop((heads + (quad - 1)) // i64(quad)) as part:
            first = let(acc + part * (quad * self._stride))
            totals = []
            for head in range(quad):
                factor = let(T.broadcast(decay[part * quad + head], LANES))
                for i in range(vectors):
                    totals.append(local(words[at(first + (head * self._stride + i * LANES), LANES)] * factor))
            p = let(base + part * quad)
            with loop(size) as entry:
                row = let(begin + entry * stride)
                values = [let(source[at(row + i * LANES, LANES)]) for i in range(vectors)]
                for head in range(quad):
                    weight = let(broadcast(words, p + entry * LANES + head))
                    for i, value in enumerate(values):
                        total = totals[head * vectors + i]
                        total.set(fma(weight, value, total.value))
            for head in range(quad):
                for i in range(vectors):
                    put(words, first + (head * self._stride + i * LANES), totals[head * vectors + i].value)

    def _finish(self, body: Body, token: Expr, group: Expr, base: Expr, place: Expr, count: Expr) -> None:
        """Add the sink and divide."""
        words, sink, (out,) = body.words, body.operands[2], body.results
        state = let(base + self._state + place * (2 * LANES))
        sinks = array(LANES)
        for lane in range(LANES):
            put(sinks, i64(lane), sink[T.min(group * LANES + lane, i64(self._heads - 1))])
        # without entries the maximum is -inf: the accumulators are zero and the divisor is one
        empty = count == 0
        divisors = array(LANES)
        total = words[at(state + LANES, LANES)] + exp(sinks[at(0, LANES)] - words[at(state, LANES)])
        put(divisors, i64(0), T.Select(T.broadcast(empty, LANES), const(1.0, LANES), total))
        acc = let(base + self._acc + place * (LANES * self._stride))
        first = let((token * self._heads + group * LANES) * self._width)
        with loop(T.min(i64(self._heads) - group * LANES, i64(LANES))) as head:
            divisor = let(T.broadcast(divisors[head], LANES))
            with loop(self._width // LANES) as i:
                value = words[at(acc + head * self._stride + i * LANES, LANES)] / divisor
                store(out, first + head * self._width + i * LANES, value)
