"""The candidate pool: the blocks with the best rows by the indexer's scores.

When there are no more blocks than places, none is scored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from tvm.script.ir_builder import tirx as T

from v41c.codegen.cpu.frame import Body, build_kernel
from v41c.codegen.cpu.index_choice import BlockChoice, BlockScan, visible_rows
from v41c.codegen.cpu.index_schedule import IndexSchedule
from v41c.codegen.cpu.index_scores import IndexScores
from v41c.codegen.cpu.selection import Selection
from v41c.codegen.cpu.sparse import Types
from v41c.codegen.cpu.tir import Buffer, Expr, cast, i64, let, local, when
from v41c.codegen.kernel import CpuKernel
from v41c.ir.ops.candidate_blocks import CandidateBlocks
from v41c.ir.types import TensorType

if TYPE_CHECKING:
    from v41c.targets.target import CpuTarget


def kernel(
    op: CandidateBlocks, operands: Types, results: tuple[TensorType, ...], target: CpuTarget, bounds: Mapping[str, int]
) -> CpuKernel:
    """The kernel."""
    schedule = IndexSchedule(operands, (op.blocks - 1,), bounds, target)

    def emit(body: Body) -> None:
        positions, slots = body.operands[3:]
        visible = partial(visible_rows, positions, op.ratio)
        choice = BlockChoice(body.results[0], op.blocks, op.block)

        def choose(
            token: Expr, part: Expr, parts: Expr, scores: IndexScores, bests: Sequence[Selection]
        ) -> tuple[Expr, ...]:
            blocks = let(choice.older(visible(token)))
            with when(T.And(blocks <= choice.places, part == 0)):
                choice.write_first(token, let(visible(token)))
            with when(blocks > choice.places):
                scores.prepare(token)
                chunk = let((blocks + (parts - 1)) // parts)
                block = let(T.min(part * chunk, blocks))
                row = local(block * op.block)
                end = let(T.min(block + chunk, blocks) * op.block)
                scan = BlockScan(block, op.block)
                with T.While(row.value < end):
                    scores.set_rows(row.value, end - 1)
                    scores.score(cast(slots[token], "int64"))
                    scan.offer(scores, bests[0], T.min(end - row.value, i64(scores.tile)))
                    row.set(row.value + scores.tile)
            return (blocks > choice.places,)

        def write(token: Expr, memory: Buffer, ids: Expr, count: Expr) -> None:
            choice.write(token, memory, ids, count, choice.older(visible(token)))

        schedule.emit(body, op.scale, lambda token: choice.older(visible(token)) * op.block, choose, (write,))

    return build_kernel(emit, op, operands, results, bounds, scratch_words=schedule.words)
