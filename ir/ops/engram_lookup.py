"""Rows of an Engram table, dequantised (DeepSeek-V4.1 report, section 2.2: Engram)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from v41c.ir import formats
from v41c.ir.op import FLOATS, Example, Op, product, seeded
from v41c.ir.types import DType, TensorType

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class EngramLookup(Op):
    """out[t, q·dh + i] = table[rows[t, q], i] · scale[rows[t, q], i // 32]

    Exact: an e4m3 value times a power of two; rounded to `out` only for an f32 table. The table is read by rows.
    """

    out: str

    def infer(self, rows: TensorType, table: TensorType, scale: TensorType | None = None) -> TensorType:
        self.require_dtype("rows", rows, DType.I64)
        self.require_rank("rows", rows, 2)
        self.require_dtype("table", table, *FLOATS, DType.F8E4M3)
        self.require_rank("table", table, 2)
        self.require(
            (scale is not None) == (table.dtype == DType.F8E4M3), "scale", "one iff the table is f8e4m3", scale
        )
        if scale is not None:
            self.require_dtype("scale", scale, DType.E8M0)
            self.require_shape("scale", scale, table.shape[0], int(table.shape[1]) // 32)
        return TensorType(DType(self.out), (rows.shape[0], product(rows.shape[1], table.shape[1])))

    def reference(self, rows: Tensor, table: Tensor, scale: Tensor | None = None) -> Tensor:
        import torch

        values = read_table(table, rows).float()
        if scale is not None:
            factors = formats.decode_e8m0(read_table(scale, rows))
            values = (values.unflatten(-1, (-1, 32)) * factors.unsqueeze(-1)).flatten(-2)
        return values.flatten(1).to(torch.float32 if self.out == "f32" else torch.bfloat16)

    def flops(self, rows: TensorType, table: TensorType, scale: TensorType | None = None) -> int:
        return product(*rows.shape, table.shape[1])

    def touched(self, rows: TensorType, table: TensorType, scale: TensorType | None = None) -> Mapping[str, int]:
        read = {"table": TensorType(table.dtype, (*rows.shape, table.shape[1])).size_bytes}
        if scale is not None:
            read["scale"] = TensorType(scale.dtype, (*rows.shape, scale.shape[1])).size_bytes
        return read

    @classmethod
    def examples(cls) -> Iterator[Example]:
        import torch

        normal = seeded(22)
        rows = torch.tensor([[0, 12, 3], [12, 7, 7]])
        table = (normal(13, 64) * 60).to(torch.float8_e4m3fn)
        codes = (normal(13, 2) * 4 + 118).to(torch.uint8).view(torch.float8_e8m0fnu)
        yield Example(cls("bf16"), (rows, table, codes))
        yield Example(cls("f32"), (rows[:1], table, codes))
        yield Example(cls("bf16"), (rows, normal(13, 40, dtype="bf16"), None))


def read_table(table: Tensor, rows: Tensor) -> Tensor:
    """table[rows] for one-byte dtypes that torch cannot index."""
    import torch

    return table.view(torch.uint8)[rows].view(table.dtype) if table.element_size() == 1 else table[rows]
