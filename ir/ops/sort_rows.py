"""The order in which the rows of a table are read, and the request to have them in memory by then."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from v41c.ir.op import Example, Op, seeded
from v41c.ir.types import DType, TensorType, i32

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class SortRows(Op):
    """ordered[i] = rows[places[i]], ascending;  i and places count the pairs (t, q) row by row, t · Q + q

    Integer. Equal rows keep their order, so that they stand side by side. Nothing of `table` and `scale` is read: where
    they are given, the operating system is asked to bring the rows from disk while the step goes on.
    """

    def infer(
        self, rows: TensorType, table: TensorType | None = None, scale: TensorType | None = None
    ) -> tuple[TensorType, TensorType]:
        self.require_dtype("rows", rows, DType.I64)
        self.require_rank("rows", rows, 2)
        for name, operand in (("table", table), ("scale", scale)):
            if operand is not None:
                self.require_rank(name, operand, 2)
        self.require(table is not None or scale is None, "scale", "none without a table", scale)
        return rows, i32(*rows.shape)

    def reference(
        self, rows: Tensor, table: Tensor | None = None, scale: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        ordered, places = rows.flatten().sort(stable=True)
        return ordered.view_as(rows), places.view_as(rows).int()

    def flops(self, rows: TensorType, table: TensorType | None = None, scale: TensorType | None = None) -> int:
        return 0

    def touched(
        self, rows: TensorType, table: TensorType | None = None, scale: TensorType | None = None
    ) -> Mapping[str, int]:
        return {"table": 0, "scale": 0}

    @classmethod
    def examples(cls) -> Iterator[Example]:
        import torch

        yield Example(cls(), (torch.tensor([[7, 0, 7]]), None, None))
        yield Example(cls(), (torch.tensor([[5, 2], [2, 5], [5, 5], [0, 2]]), None, None))
        normal = seeded(32)
        rows = (normal(19, 3) * 4).long() + 20
        table = normal(40, 32).to(torch.float8_e4m3fn)
        scale = torch.full((40, 1), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu)
        yield Example(cls(), (rows, table, scale))
        yield Example(cls(), (rows, normal(40, 24), None))
