"""The candidate pool: the blocks with the best rows by the indexer's scores.

The newest block has its place anyway, so the others are scored for the places that are left; when there are no more
blocks than places, none is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tvm.script.ir_builder import tirx as T

from v41c.codegen.cpu.frame import Body, build_kernel
from v41c.codegen.cpu.index_schedule import IndexSchedule
from v41c.codegen.cpu.index_scores import IndexScores
from v41c.codegen.cpu.selection import LOWEST, Selection, order_keys
from v41c.codegen.cpu.sparse import Types, array, fill
from v41c.codegen.cpu.tir import LANES, Buffer, Expr, at, cast, i64, let, local, loop, put, when
from v41c.codegen.kernel import CpuKernel
from v41c.ir.ops.candidate_blocks import CandidateBlocks
from v41c.ir.types import TensorType

if TYPE_CHECKING:
    from v41c.targets.target import CpuTarget


def kernel(
    op: CandidateBlocks, operands: Types, results: tuple[TensorType, ...], target: CpuTarget, bounds: Mapping[str, int]
) -> CpuKernel:
    """The kernel."""
    places = op.blocks - 1  # without the newest block's
    schedule = IndexSchedule(operands, places, bounds, target)

    def emit(body: Body) -> None:
        positions, slots = body.operands[3:]
        (out,) = body.results

        def visible(token: Expr) -> Expr:
            return cast((positions[token] + 1) // T.int32(op.ratio), "int64")

        def older_blocks(token: Expr) -> Expr:
            return T.max(visible(token) - 1, i64(0)) // i64(op.block)

        def choose(token: Expr, part: Expr, parts: Expr, scores: IndexScores, best: Selection) -> Expr:
            blocks = let(older_blocks(token))
            with when(T.And(blocks <= places, part == 0)):
                total = let((visible(token) + (op.block - 1)) // i64(op.block))
                with loop(total) as i:
                    put(out, token * op.blocks + i, cast(i, "int32"))
                fill(out, token * op.blocks + total, op.blocks - total, T.int32(-1))
            with when(blocks > places):
                scores.prepare(token)
                chunk = let((blocks + (parts - 1)) // parts)
                block = local(T.min(part * chunk, blocks))
                row = local(block.value * op.block)
                end = let(T.min(block.value + chunk, blocks) * op.block)
                highest, left = local(T.int32(LOWEST)), local(T.int64(op.block))
                keys = array(scores.tile, "int32")
                with T.While(row.value < end):
                    scores.set_rows(row.value, end - 1)
                    scores.score(cast(slots[token], "int64"))
                    best.reserve(scores.tile)
                    for lane in range(0, scores.tile, LANES):
                        put(keys, i64(lane), order_keys(scores.scores[at(lane, LANES)]))
                    with loop(T.min(end - row.value, i64(scores.tile))) as place:
                        highest.set(T.max(highest.value, keys[place]))
                        left.set(left.value - 1)
                        with when(left.value == 0):
                            best.push(highest.value, cast(block.value, "int32"))
                            block.set(block.value + 1)
                            highest.set(T.int32(LOWEST))
                            left.set(T.int64(op.block))
                    row.set(row.value + scores.tile)
            return blocks > places

        def write(token: Expr, memory: Buffer, ids: Expr, count: Expr) -> None:
            with loop(count) as i:
                put(out, token * op.blocks + i, memory[ids + i])
            put(out, token * op.blocks + count, cast(older_blocks(token), "int32"))
            fill(out, token * op.blocks + count + 1, places - count, T.int32(-1))

        schedule.emit(body, op.scale, lambda token: older_blocks(token) * op.block, choose, write)

    return build_kernel(emit, op, operands, results, bounds, scratch_words=schedule.words)
