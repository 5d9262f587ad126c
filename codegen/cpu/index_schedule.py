"""How the selections of the indexer are spread over threads.

With many tokens a task takes whole tokens; with few tokens and a long context a token's rows are cut in parts, whose
short lists of the best are merged in order. The best under (score, lower id) are one set and a score has the same bits
everywhere, so the result does not depend on the cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from tvm.script.ir_builder import tirx as T

from v41c.codegen.cpu.frame import Body, bound_of
from v41c.codegen.cpu.index_scores import IndexScores
from v41c.codegen.cpu.selection import Selection, prune
from v41c.codegen.cpu.sparse import Types, required
from v41c.codegen.cpu.tir import LANES, Buffer, Expr, at, cast, i64, let, local, loop, parallel, put, when
from v41c.ir.types import Dim

if TYPE_CHECKING:
    from v41c.targets.target import CpuTarget

TASKS = 64  # tasks of a step of many tokens: enough to balance, few enough to keep scratch small
PARTS = 16  # most tasks of a step that cuts rows in parts
PART_WORK = 1 << 18  # multiply-adds that are worth a part of their own


#: writes the chosen ids of a token: (token, memory, ids, count)
Write = Callable[[Expr, Buffer, Expr, Expr], None]


class IndexSchedule:
    """Scratch and loops of one kernel that keeps, for each of its results, the `keep` best."""

    def __init__(self, types: Types, keeps: Sequence[int], bounds: Mapping[str, int], target: CpuTarget) -> None:
        q, keys = required(types, 0, 2)
        self._types, self._keeps, self._target = types, tuple(keeps), target
        self._tokens: Dim = q.shape[0]
        self._row_work = int(q.shape[1]) * int(q.shape[2])
        tokens = bound_of(self._tokens, bounds)
        self._parts = max(1, min(PARTS, bound_of(keys.shape[1], bounds) * self._row_work // PART_WORK))
        self._slots = max(min(TASKS, tokens), self._parts)
        self._alone = tokens <= 1 and self._parts == 1
        self._task_words = IndexScores.words(types, target) + sum(map(Selection.words, keeps))
        self._counts = self._slots * self._task_words
        self._merge = self._counts + PARTS * len(keeps)
        self._room = PARTS * (max(keeps) + LANES)

    @property
    def words(self) -> int:
        """Words of workspace: of the tasks, the parts' counts, and the merged lists."""
        return self._merge + (2 * self._room if self._parts > 1 else 0)

    def emit(
        self,
        body: Body,
        scale: float,
        rows_of: Callable[[Expr], Expr],
        select: Callable[[Expr, Expr, Expr, IndexScores, Sequence[Selection]], Sequence[Expr]],
        writes: Sequence[Write],
    ) -> None:
        """Emit the loops.

        `rows_of(token)` is the number of rows to score at most; `select(token, part, parts, scores, bests)` pushes one
        part's rows into `bests` and returns a condition for each: whether there is something to write.
        """
        tokens = let(body.size(self._tokens))
        parts = local(T.int64(1))
        if self._parts > 1:
            self._choose_parts(tokens, parts, rows_of)
        tasks = let(T.min(tokens * parts.value, i64(max(TASKS, PARTS))))
        stride = let(tasks // parts.value)
        with loop(tasks) if self._alone else parallel(tasks) as task:
            base = let(task * self._task_words)
            scores = IndexScores(body, self._types, scale, base, self._target)
            bests = self._selections(body.integers, base)
            part = let(task % parts.value)
            token = local(task // parts.value)
            with T.While(token.value < tokens):
                for best in bests:
                    best.reset()
                found = select(token.value, part, parts.value, scores, bests)
                for index, (some, best, write) in enumerate(zip(found, bests, writes, strict=True)):
                    if self._parts > 1:
                        put(body.integers, self._counts + index * PARTS + task, T.int32(-1))
                    with when(some):
                        best.finish()
                        if self._parts == 1:
                            write(token.value, body.integers, best.ids, best.count.value)
                        else:
                            put(body.integers, self._counts + index * PARTS + task, cast(best.count.value, "int32"))
                            with when(parts.value == 1):
                                write(token.value, body.integers, best.ids, best.count.value)
                token.set(token.value + stride)
        if self._parts > 1:
            with when(parts.value > 1), loop(tokens) as token:
                for index, write in enumerate(writes):
                    self._merge_parts(body, token, parts.value, index, write)

    def _selections(self, memory: Buffer, base: Expr) -> list[Selection]:
        """Those of a task whose words begin at `base`: behind its scores, one after another."""
        begins = list(accumulate(self._keeps[:-1], lambda at, keep: at + Selection.words(keep), initial=0))
        lists = base + IndexScores.words(self._types, self._target)
        return [Selection(memory, let(lists + at), keep) for at, keep in zip(begins, self._keeps, strict=True)]

    def _choose_parts(self, tokens: Expr, parts: Expr, rows_of: Callable[[Expr], Expr]) -> None:
        with when(T.And(tokens > 0, tokens <= self._parts)):
            longest = local(T.int64(0))
            with loop(tokens) as token:
                longest.set(T.max(longest.value, rows_of(token)))
            wanted = T.min(i64(self._parts) // tokens, longest.value * self._row_work // i64(PART_WORK))
            parts.set(T.max(wanted, i64(1)))

    def _merge_parts(self, body: Body, token: Expr, parts: Expr, index: int, write: Write) -> None:
        """Of the result `index`."""
        memory, keep, counts = body.integers, self._keeps[index], self._counts + index * PARTS
        keys, ids = i64(self._merge), i64(self._merge + self._room)
        first = let(token * parts)
        with when(memory[counts + first] >= 0):
            total = local(T.int64(0))
            with loop(parts) as part:
                count = let(cast(memory[counts + first + part], "int64"))
                lists = self._selections(memory, let((first + part) * self._task_words))[index]
                with loop((count + (LANES - 1)) // i64(LANES)) as i:
                    for target, origin in ((keys, lists.keys), (ids, lists.ids)):
                        put(memory, target + total.value + i * LANES, memory[at(origin + i * LANES, LANES)])
                total.set(total.value + count)
            with when(total.value > keep):
                prune(memory, keys, ids, total, keep, local(T.int32(0)))
            write(token, memory, ids, total.value)
