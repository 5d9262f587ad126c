"""Token embedding: one table row per token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from v41c.ir.op import FLOATS, Example, Op, seeded
from v41c.ir.types import DType, TensorType

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Embedding(Op):
    """out[t, d] = table[tokens[t], d]

    No accumulation; the row is rounded to `out`.
    """

    out: str

    def infer(self, tokens: TensorType, table: TensorType) -> TensorType:
        self.require_dtype("tokens", tokens, DType.I32)
        self.require_rank("tokens", tokens, 1)
        self.require_dtype("table", table, *FLOATS)
        self.require_rank("table", table, 2)
        return TensorType(DType(self.out), (tokens.shape[0], table.shape[1]))

    def reference(self, tokens: Tensor, table: Tensor) -> Tensor:
        import torch

        return table[tokens.long()].to(torch.float32 if self.out == "f32" else torch.bfloat16)

    def flops(self, tokens: TensorType, table: TensorType) -> int:
        return 0

    def touched(self, tokens: TensorType, table: TensorType) -> Mapping[str, int]:
        return {"table": TensorType(table.dtype, (tokens.shape[0], table.shape[1])).size_bytes}

    @classmethod
    def examples(cls) -> Iterator[Example]:
        import torch

        normal = seeded(1)
        for count in (1, 5):
            tokens = torch.arange(count, dtype=torch.int32) * 3 % 11
            yield Example(cls("bf16"), (tokens, normal(11, 40, dtype="bf16")))
        yield Example(cls("f32"), (torch.tensor([7, 0, 7], dtype=torch.int32), normal(9, 33)))
