"""Selection and candidate pool from scores that are made once: of every visible row, where either needs them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from tvm.script.ir_builder import tirx as T

from v41c.codegen.cpu.frame import Body, build_kernel
from v41c.codegen.cpu.index_choice import BlockChoice, BlockScan, RowChoice, visible_rows
from v41c.codegen.cpu.index_schedule import IndexSchedule
from v41c.codegen.cpu.index_scores import IndexScores
from v41c.codegen.cpu.selection import Selection, push_tile
from v41c.codegen.cpu.sparse import Types
from v41c.codegen.cpu.tir import Buffer, Expr, cast, i64, let, local, when
from v41c.codegen.kernel import CpuKernel
from v41c.ir.ops.index_topk_blocks import IndexTopkBlocks
from v41c.ir.types import TensorType

if TYPE_CHECKING:
    from v41c.targets.target import CpuTarget


def kernel(
    op: IndexTopkBlocks, operands: Types, results: tuple[TensorType, ...], target: CpuTarget, bounds: Mapping[str, int]
) -> CpuKernel:
    """The kernel."""
    schedule = IndexSchedule(operands, (op.topk, op.blocks - 1), bounds, target)

    def emit(body: Body) -> None:
        positions, slots = body.operands[3:]
        visible = partial(visible_rows, positions, op.ratio)
        rows = RowChoice(body.results[0], op.topk)
        blocks = BlockChoice(body.results[1], op.blocks, op.block)

        def choose(
            token: Expr, part: Expr, parts: Expr, scores: IndexScores, bests: Sequence[Selection]
        ) -> tuple[Expr, ...]:
            count = let(visible(token))
            older = let(blocks.older(count))
            by_rows, by_blocks = count > op.topk, older > blocks.places
            with when(T.And(T.Not(by_rows), part == 0)):
                rows.write_first(token, count)
            with when(T.And(T.Not(by_blocks), part == 0)):
                blocks.write_first(token, count)
            with when(T.Or(by_rows, by_blocks)):
                scores.prepare(token)
                # a part begins where a tile and a block do
                unit = math.lcm(scores.tile, op.block)
                chunk = let((count + (parts * unit - 1)) // (parts * unit) * unit)
                first = local(part * chunk)
                end = let(T.min(count, first.value + chunk))
                whole = let(T.min(older * op.block, end))
                scan = BlockScan(let(first.value // i64(op.block)), op.block)
                with T.While(first.value < end):
                    scores.set_rows(first.value, end - 1)
                    scores.score(cast(slots[token], "int64"))
                    with when(by_rows):
                        push_tile(bests[0], scores, end - first.value)
                    with when(T.And(by_blocks, first.value < whole)):
                        scan.offer(scores, bests[1], T.min(whole - first.value, i64(scores.tile)))
                    first.set(first.value + scores.tile)
            return by_rows, by_blocks

        def write_blocks(token: Expr, memory: Buffer, ids: Expr, count: Expr) -> None:
            blocks.write(token, memory, ids, count, blocks.older(visible(token)))

        schedule.emit(body, op.scale, visible, choose, (rows.write, write_blocks))

    return build_kernel(emit, op, operands, results, bounds, scratch_words=schedule.words)
