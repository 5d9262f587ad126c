"""Rows of an Engram table, read in their order and put where they belong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from v41c.ir.op import Example, Op
from v41c.ir.ops.engram_lookup import EngramLookup
from v41c.ir.ops.sort_rows import SortRows
from v41c.ir.types import DType, TensorType

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class EngramLookupOrdered(Op):
    """out[places[j]] = engram_lookup(rows, table, scale)[j], j = t · Q + q a pair of a token and a row of the table

    Exact, as `engram_lookup`. `rows` ascend and `places` is a permutation, as `sort_rows` gives them: equal rows stand
    side by side and are read once.
    """

    out: str
    traced: ClassVar[bool] = False

    def infer(
        self, rows: TensorType, places: TensorType, table: TensorType, scale: TensorType | None = None
    ) -> TensorType:
        (values,) = EngramLookup(self.out).infer_results((rows, table, scale))
        self.require_dtype("places", places, DType.I32)
        self.require_shape("places", places, *rows.shape)
        return values

    def reference(self, rows: Tensor, places: Tensor, table: Tensor, scale: Tensor | None = None) -> Tensor:
        import torch

        values = EngramLookup(self.out).reference(rows, table, scale)
        out = torch.empty_like(values)
        out.view(rows.numel(), table.shape[1])[places.flatten().long()] = values.view(rows.numel(), table.shape[1])
        return out

    def flops(self, rows: TensorType, places: TensorType, table: TensorType, scale: TensorType | None = None) -> int:
        return EngramLookup(self.out).flops(rows, table, scale)

    def touched(
        self, rows: TensorType, places: TensorType, table: TensorType, scale: TensorType | None = None
    ) -> Mapping[str, int]:
        """Every row counts: how many are equal is not known before."""
        return EngramLookup(self.out).touched(rows, table, scale)

    @classmethod
    def examples(cls) -> Iterator[Example]:
        for example in EngramLookup.examples():
            rows, table, scale = example.operands
            if rows is not None:
                op = cls(example.op.attributes()["out"])
                yield Example(op, (*SortRows().reference(rows), table, scale))
