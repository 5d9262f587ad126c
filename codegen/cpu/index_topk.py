"""Selection of compressed rows by the indexer's scores: every visible row is scored, those outside a pool are dropped.

Without a pool, and with no more visible rows than places, none is scored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from tvm.script.ir_builder import tirx as T

from v41c.codegen.cpu.frame import Body, build_kernel
from v41c.codegen.cpu.index_choice import RowChoice, visible_rows
from v41c.codegen.cpu.index_schedule import IndexSchedule
from v41c.codegen.cpu.index_scores import IndexScores
from v41c.codegen.cpu.selection import UNRANKED, Selection, push_tile
from v41c.codegen.cpu.sparse import Types
from v41c.codegen.cpu.tir import Buffer, Expr, Local, cast, from_bits, i64, iconst, let, local, loop, put, when
from v41c.codegen.kernel import CpuKernel
from v41c.ir.ops.index_topk import IndexTopk
from v41c.ir.types import TensorType

if TYPE_CHECKING:
    from v41c.targets.target import CpuTarget


def kernel(
    op: IndexTopk, operands: Types, results: tuple[TensorType, ...], target: CpuTarget, bounds: Mapping[str, int]
) -> CpuKernel:
    """The kernel; a token's pool holds distinct blocks in ascending order, negative entries anywhere."""
    schedule = IndexSchedule(operands, (op.topk,), bounds, target)
    pool_type = operands[5]
    pool_width = 0 if pool_type is None else int(pool_type.shape[1])

    def emit(body: Body) -> None:
        positions, slots, pool = body.operands[3:]
        visible = partial(visible_rows, positions, op.ratio)
        choice = RowChoice(body.results[0], op.topk)

        def choose(
            token: Expr, part: Expr, parts: Expr, scores: IndexScores, bests: Sequence[Selection]
        ) -> tuple[Expr, ...]:
            count = let(visible(token))
            scored = count > (op.topk if pool is None else 0)
            with when(T.And(T.Not(scored), part == 0)):
                choice.write_first(token, count)
            with when(scored):
                scores.prepare(token)
                chunk = let((count + (parts * scores.tile - 1)) // (parts * scores.tile) * scores.tile)
                first = local(part * chunk)
                end = let(T.min(count, first.value + chunk))
                entry = local(token * pool_width)
                with T.While(first.value < end):
                    scores.set_rows(first.value, end - 1)
                    scores.score(cast(slots[token], "int64"))
                    if pool is not None:
                        _drop_others(scores, first.value, pool, entry, let((token + 1) * pool_width), op.block)
                    push_tile(bests[0], scores, end - first.value)
                    first.set(first.value + scores.tile)
            return (scored,)

        schedule.emit(body, op.scale, visible, choose, (choice.write,))

    return build_kernel(emit, op, operands, results, bounds, scratch_words=schedule.words)


def _drop_others(scores: IndexScores, first: Expr, pool: Buffer, entry: Local, end: Expr, block: int) -> None:
    """Take the rows first … of a tile that lie in no block of the pool out of the ranking; `entry` goes along."""
    with loop(scores.tile) as place:
        row = let(first + place)

        def behind(number: Expr, row: Expr = row) -> Expr:
            return T.Or(number < 0, (cast(number, "int64") + 1) * block <= row)

        last = let(T.max(end - 1, i64(0)))
        with T.While(T.And(entry.value < end, behind(pool[T.min(entry.value, last)]))):
            entry.set(entry.value + 1)
        inside = T.And(entry.value < end, cast(pool[T.min(entry.value, last)], "int64") * block <= row)
        with when(T.Not(inside)):
            put(scores.scores, place, from_bits(iconst(UNRANKED)))
