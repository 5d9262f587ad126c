"""Sequential draft tokens: token by token, the head's product and the search for its maximum in one pass over threads.

Each task keeps the maximum of its panels; the tasks' maxima are compared in order of the vocabulary, so that ties go to
the lower token however the panels are shared out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tvm.script.ir_builder import tirx as T

from v41c.codegen.cpu.frame import Body, build_kernel
from v41c.codegen.cpu.sparse import Types, array, broadcast, registers, required, round_up
from v41c.codegen.cpu.tir import (
    LANES,
    Expr,
    Local,
    at,
    cast,
    const,
    each,
    fma,
    i64,
    iconst,
    join_lanes,
    let,
    load,
    local,
    loop,
    maximum,
    minimum,
    parallel,
    put,
    select,
    splat,
    when,
)
from v41c.codegen.kernel import CpuKernel
from v41c.ir.ops.markov_chain import MarkovChain
from v41c.ir.types import TensorType

if TYPE_CHECKING:
    from v41c.targets.target import CpuTarget

TASKS = 64  # that share the panels of a head
_NO_TOKEN = (1 << 31) - 1


def kernel(
    op: MarkovChain, operands: Types, results: tuple[TensorType, ...], target: CpuTarget, bounds: Mapping[str, int]
) -> CpuKernel:
    """The kernel; the head is stored in panels, in strips of as many as are multiplied side by side."""
    logits_type, head_type = required(operands, 0, 4)
    vocabulary, rank = (int(dim) for dim in head_type.shape)
    panels = -(-vocabulary // LANES)
    step = min(panels, 8 if target.vector_registers >= 32 else 4)
    strips = -(-panels // step)
    per_task = -(-strips // TASKS)
    tasks = -(-strips // per_task)
    values = round_up(rank)

    def emit(body: Body) -> None:
        logits, tokens, starts, embed, head = body.operands
        out, inputs, drafts = body.results
        with loop(body.size(logits_type.shape[0])) as row:
            token = local(tokens[row])
            with when(T.NE(cast(starts[row], "int64"), row)):
                token.set(drafts[row - 1])
            put(inputs, row, token.value)
            source = let(cast(token.value, "int64") * rank)
            each(rank, lambda i, lanes: put(body.words, i, load(embed, source + i, lanes)))
            start = let(row * vocabulary)
            with parallel(tasks, vocabulary * rank) as task:
                best = _Best()
                with loop(per_task) as part:
                    # strips past the last repeat it, and so do panels within it: the same sums, stored again
                    first = let(T.min(task * per_task + part, i64(strips - 1)) * step)
                    width = let(T.min(i64(step), i64(panels) - first))
                    places = [let(T.min(i64(j), width - 1)) for j in range(step)]
                    sums = registers(step)
                    with loop(rank) as k:
                        factor = let(broadcast(body.words, k))
                        row_start = let(first * rank + k * width)
                        for place, total in zip(places, sums, strict=True):
                            total.set(fma(factor, load(head, (row_start + place) * LANES), total.value))
                    chosen = [let(first + place) for place in places]
                    for panel, total in zip(chosen, sums, strict=True):
                        _add_panel(logits, out, start, panel, vocabulary, total.value, best)
                highest = let(join_lanes(best.value.value, maximum))
                reached = best.value.value >= splat(highest, LANES)
                candidates = select(reached, best.token.value, iconst(_NO_TOKEN, LANES))
                put(body.words, task + values, highest)
                put(body.integers, task + (values + tasks), join_lanes(candidates, minimum))
            highest, draft = local(body.words[values]), local(body.integers[values + tasks])
            with loop(tasks - 1) as task:
                value = let(body.words[task + (values + 1)])
                with when(value > highest.value):
                    highest.set(value)
                    draft.set(body.integers[task + (values + tasks + 1)])
            put(drafts, row, draft.value)

    return build_kernel(
        emit,
        op,
        operands,
        results,
        bounds,
        scratch_words=values + 2 * tasks,
        layouts={4: f"panels{step}"},
    )


class _Best:
    """The largest value of each lane and the first token that had it."""

    def __init__(self) -> None:
        self.value: Local = local(const(float("-inf"), LANES))
        self.token: Local = local(iconst(0, LANES))

    def offer(self, values: Expr, first: Expr) -> None:
        """Compare 16 tokens from `first` on; tokens must come in ascending order."""
        better = values > self.value.value
        numbers = T.broadcast(cast(first, "int32"), LANES) + T.ramp(T.int32(0), T.int32(1), LANES)
        self.token.set(select(better, numbers, self.token.value))
        self.value.set(select(better, values, self.value.value))


def _add_panel(logits: Expr, out: Expr, start: Expr, panel: Expr, vocabulary: int, product: Expr, best: _Best) -> None:
    whole, rest = divmod(vocabulary, LANES)
    first = let(panel * LANES)
    with when(panel < whole):
        value = let(load(logits, start + first) + product)
        put(out, start + first, value)
        best.offer(value, first)
    if rest:
        with when(panel == whole):
            values = array(LANES)
            put(values, i64(0), const(float("-inf"), LANES))
            with loop(rest) as lane:
                put(values, lane, logits[start + first + lane])
            value = let(values[at(i64(0), LANES)] + product)
            put(values, i64(0), value)
            with loop(rest) as lane:
                put(out, start + first + lane, values[lane])
            best.offer(value, first)
