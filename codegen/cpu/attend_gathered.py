"""Attention with its rotations over rows that were gathered before: `attend` with another place to find them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from v41c.codegen.cpu.attend import rotated_kernel
from v41c.codegen.cpu.attention_entries import Entries
from v41c.codegen.cpu.sparse import Types
from v41c.codegen.cpu.tir import Expr, cast
from v41c.codegen.kernel import CpuKernel
from v41c.ir.ops.attend_gathered import AttendGathered
from v41c.ir.types import TensorType

if TYPE_CHECKING:
    from v41c.targets.target import Target


def kernel(
    op: AttendGathered, operands: Types, results: tuple[TensorType, ...], target: Target, bounds: Mapping[str, int]
) -> CpuKernel:
    """The kernel."""
    return rotated_kernel(op, operands, results, target, bounds, _Gathered)


class _Gathered(Entries):
    """Entries whose selected rows lie side by side, a token's after the other's, in the order of the selection."""

    def _row_of(self, row: Expr, place: Expr) -> Expr:
        return cast(place, "int32")

    def _first_selected(self, kind: TensorType) -> Expr:
        return self._token * int(kind.shape[1])
