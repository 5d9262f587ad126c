"""Attention with its rotations over rows that were gathered before: `attend` with another place to find them.

A single token's blocks of 64 entries that are made of gathered rows alone are read where they lie; others are copied
behind the keys of the window, as the blocks of `attend` are cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from tvm.script.ir_builder import tirx as T

from v41c.codegen.cpu.attend import rotated_kernel
from v41c.codegen.cpu.attention_entries import Entries
from v41c.codegen.cpu.frame import Body
from v41c.codegen.cpu.sparse import Types, required
from v41c.codegen.cpu.tir import Expr, cast, i64, let, local, loop, when
from v41c.codegen.kernel import CpuKernel
from v41c.ir.ops.attend_gathered import AttendGathered
from v41c.ir.ops.attention import BLOCK, Attention
from v41c.ir.types import TensorType

if TYPE_CHECKING:
    from v41c.targets.target import CpuTarget


def kernel(
    op: AttendGathered, operands: Types, results: tuple[TensorType, ...], target: CpuTarget, bounds: Mapping[str, int]
) -> CpuKernel:
    """The kernel."""
    return rotated_kernel(op, operands, results, target, bounds, _Gathered)


class _Gathered(Entries):
    """Entries whose selected rows lie side by side, a token's after the other's, in the order of the selection."""

    def __init__(self, body: Body, op: Attention, types: Types, token: Expr, target: CpuTarget) -> None:
        super().__init__(body, op, types, token, target)
        (kind,) = required(types, 8)
        self._places, self.stride = int(kind.shape[1]), int(kind.shape[2])
        self.direct = body.operands[8]

    def choose(self, memory: Expr) -> None:
        """Count the rows: there is nothing to copy."""
        selection, kept = self._body.operands[9], local(T.int64(0))
        with loop(self._places) as i:
            kept.set(kept.value + cast(selection[self._token * self._places + i] >= 0, "int64"))
        self.count.set(self._window + kept.value)

    def is_direct(self, entry: Expr) -> Expr:
        first = entry // i64(BLOCK) * BLOCK
        return T.And(first >= self._window, first + BLOCK <= self.count.value)

    def unless_direct(self, entry: Expr) -> AbstractContextManager[None]:
        copied: AbstractContextManager[None] = when(let(cast(self.is_direct(entry), "int32")) == 0)
        return copied

    def place_of(self, entry: Expr) -> Expr:
        return (self._token * self._places + entry - self._window) * self.stride

    def _read_selected(self, entry: Expr, target: Expr) -> None:
        self._copy(self.direct, self.place_of(entry), target)
