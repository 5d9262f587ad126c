"""Attention with its rotations and the write of its window keys.

A group of heads of a token is rotated into the result, attended to from there, and rotated back in place: no other
memory, and no pass over the heads beside the one that attention makes.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING

from tvm.script.ir_builder import tirx as T

from v41c.codegen.cpu.attention import Plan
from v41c.codegen.cpu.attention_entries import Entries
from v41c.codegen.cpu.frame import Body, bound_of, build_kernel
from v41c.codegen.cpu.rope import rotate
from v41c.codegen.cpu.rows import write_rows
from v41c.codegen.cpu.sparse import Types, required
from v41c.codegen.cpu.tir import LANES, Buffer, Expr, cast, copy_run, i64, let, loop
from v41c.codegen.kernel import CpuKernel
from v41c.ir.ops.attend import Attend
from v41c.ir.ops.attention import Attention
from v41c.ir.types import TensorType

if TYPE_CHECKING:
    from v41c.ir.ops.attend_gathered import AttendGathered
    from v41c.targets.target import CpuTarget

_TABLES = slice(8, 10)


def kernel(
    op: Attend, operands: Types, results: tuple[TensorType, ...], target: CpuTarget, bounds: Mapping[str, int]
) -> CpuKernel:
    """The kernel."""
    return rotated_kernel(op, operands, results, target, bounds, Entries)


def rotated_kernel(
    op: Attend | AttendGathered,
    operands: Types,
    results: tuple[TensorType, ...],
    target: CpuTarget,
    bounds: Mapping[str, int],
    entries: type[Entries],
) -> CpuKernel:
    """The kernel of attention whose entries are found by `entries`."""
    window, kv, cos = required(operands, 3, 1, 8)
    plain = (*operands[: _TABLES.start], *operands[_TABLES.stop :])
    plan = _Rotated(Attention(op.scale, True), plain, bounds, target)
    plan.entries = entries
    plan.pairs = int(cos.shape[1])

    def emit(body: Body) -> None:
        q, rows, _, ring, positions, slots = body.operands[:6]
        inner = copy.copy(body)
        inner.operands = [*body.results, *body.operands[1 : _TABLES.start], *body.operands[_TABLES.stop :]]
        plan.q, plan.tables = q, (body.operands[8], body.operands[9])
        plan.emit(inner)

        def row_of(token: Expr) -> Expr:
            length = int(window.shape[1])
            return cast(slots[token], "int64") * length + cast(positions[token], "int64") % length

        count, bound = body.size(kv.shape[0]), bound_of(kv.shape[0], bounds)
        write_rows(ring, window, "fp8_e8m0_32", rows, int(kv.shape[1]), count, bound, row_of)

    return build_kernel(emit, op, operands, results, bounds, scratch_words=plan.words)


class _Rotated(Plan):
    """Attention whose queries are rotated on the way in and whose results on the way out."""

    pairs: int
    q: Buffer
    tables: tuple[Buffer, Buffer]

    def _begin(self, body: Body, token: Expr, group: Expr, base: Expr, place: Expr) -> None:
        out = body.operands[0]
        with self._heads_of(group) as lane:
            start = let((token * self._heads + group * LANES + lane) * self._width)
            copy_run(self.q, start, out, start, self._width - 2 * self.pairs)
            tail = let(start + self._width - 2 * self.pairs)
            rotate(self.q, out, tail, self.tables, let(token * self.pairs), self.pairs, inverse=False)
        super()._begin(body, token, group, base, place)

    def _finish(self, body: Body, token: Expr, group: Expr, base: Expr, place: Expr, count: Expr) -> None:
        super()._finish(body, token, group, base, place, count)
        (out,) = body.results
        with self._heads_of(group) as lane:
            tail = let((token * self._heads + group * LANES + lane + 1) * self._width - 2 * self.pairs)
            rotate(out, out, tail, self.tables, let(token * self.pairs), self.pairs, inverse=True)

    def _heads_of(self, group: Expr) -> Expr:
        return loop(T.min(i64(self._heads) - group * LANES, i64(LANES)))
