"""Selection of compressed rows among those of a token's candidate blocks.

Only visible rows of the blocks are scored. When there are no more of them than places, none is.
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
from v41c.codegen.cpu.selection import Selection, push_tile
from v41c.codegen.cpu.sparse import Types, fill, required
from v41c.codegen.cpu.tir import Buffer, Expr, cast, i64, let, local, loop, put, select, when
from v41c.codegen.kernel import CpuKernel
from v41c.ir.ops.index_candidates import IndexCandidates
from v41c.ir.types import TensorType

if TYPE_CHECKING:
    from v41c.targets.target import CpuTarget

AHEAD = 8  # blocks between the prefetch of a candidate block and its use: they lie scattered over the cache


def kernel(
    op: IndexCandidates, operands: Types, results: tuple[TensorType, ...], target: CpuTarget, bounds: Mapping[str, int]
) -> CpuKernel:
    """The kernel; a token's pool holds distinct blocks in ascending order, negative entries anywhere."""
    schedule = IndexSchedule(operands, (op.topk,), bounds, target)
    pool_width = int(required(operands, 5)[0].shape[1])

    def emit(body: Body) -> None:
        positions, slots, pool = body.operands[3:]
        visible = partial(visible_rows, positions, op.ratio)
        (out,) = body.results

        def slot(token: Expr) -> Expr:
            return cast(slots[token], "int64")

        def rows_of(token: Expr) -> Expr:
            return T.min(visible(token), i64(pool_width * op.block))

        def choose(
            token: Expr, part: Expr, parts: Expr, scores: IndexScores, bests: Sequence[Selection]
        ) -> tuple[Expr, ...]:
            count = let(visible(token))
            start = let(token * pool_width)
            allowed = local(T.int64(0))
            with loop(pool_width) as p:
                inside = count - cast(pool[start + p], "int64") * op.block
                rows = T.max(T.min(inside, i64(op.block)), i64(0))
                allowed.set(allowed.value + select(pool[start + p] >= 0, rows, i64(0)))
            with when(T.And(allowed.value <= op.topk, part == 0)):
                _write_pool(out, token, pool, start, pool_width, count, op)
            with when(allowed.value > op.topk):
                scores.prepare(token)
                chunk = let((parts + (pool_width - 1)) // parts)
                entry = local(T.min(start + part * chunk, start + pool_width))
                end = let(T.min(entry.value + chunk, start + pool_width))
                offset = local(T.int64(0))
                with T.While(entry.value < end):
                    filled = _fill_tile(scores, slot(token), pool, entry, offset, end, count, op.block)
                    scores.score(slot(token))
                    push_tile(bests[0], scores, filled)
            return (allowed.value > op.topk,)

        schedule.emit(body, op.scale, rows_of, choose, (RowChoice(out, op.topk).write,))

    return build_kernel(emit, op, operands, results, bounds, scratch_words=schedule.words)


def _write_pool(
    out: Buffer, token: Expr, pool: Buffer, start: Expr, width: int, visible: Expr, op: IndexCandidates
) -> None:
    """Every visible row of the pool's blocks."""
    count = local(T.int64(0))
    with loop(width) as p, when(pool[start + p] >= 0), loop(op.block) as offset:
        row = let(cast(pool[start + p], "int64") * op.block + offset)
        with when(row < visible):
            put(out, token * op.topk + count.value, cast(row, "int32"))
            count.set(count.value + 1)
    fill(out, token * op.topk + count.value, op.topk - count.value, T.int32(-1))


def _fill_tile(
    scores: IndexScores, slot: Expr, pool: Buffer, entry: Expr, offset: Expr, end: Expr, visible: Expr, block: int
) -> Expr:
    """Name the next rows of the pool; places that stay empty name row 0. Returns how many are filled."""
    filled = local(T.int64(0))
    with loop(scores.tile) as place:
        scores.set_row(place, T.int64(0))
    with T.While(T.And(filled.value < scores.tile, entry.value < end)):
        number = let(cast(pool[entry.value], "int64"))
        row = let(number * block + offset.value)
        with when(T.EQ(offset.value, i64(0))):
            ahead = T.max(cast(pool[T.min(entry.value + AHEAD, end - 1)], "int64"), i64(0))
            scores.expect(slot, ahead * block, block)
        inside = let(cast(T.And(number >= 0, row < visible), "int64"))
        scores.set_row(filled.value, row * inside)
        filled.set(filled.value + inside)
        offset.set(offset.value + 1)
        with when(T.Or(offset.value == block, inside == 0)):
            offset.set(T.int64(0))
            entry.set(entry.value + 1)
    return let(filled.value)
