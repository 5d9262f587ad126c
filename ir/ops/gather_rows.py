"""The rows of a step that get logits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from v41c.ir.op import Example, Op, seeded
from v41c.ir.types import DType, TensorType

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class GatherRows(Op):
    """out[r, d] = x[rows[r], d]

    No arithmetic.
    """

    def infer(self, x: TensorType, rows: TensorType) -> TensorType:
        self.require_rank("x", x, 2)
        self.require_dtype("rows", rows, DType.I32)
        self.require_rank("rows", rows, 1)
        return TensorType(x.dtype, (rows.shape[0], x.shape[1]))

    def reference(self, x: Tensor, rows: Tensor) -> Tensor:
        return x[rows.long()]

    def flops(self, x: TensorType, rows: TensorType) -> int:
        return 0

    def touched(self, x: TensorType, rows: TensorType) -> Mapping[str, int]:
        return {"x": TensorType(x.dtype, (rows.shape[0], x.shape[1])).size_bytes}

    @classmethod
    def examples(cls) -> Iterator[Example]:
        import torch

        normal = seeded(24)
        yield Example(cls(), (normal(5, 40, dtype="bf16"), torch.tensor([4, 0, 4], dtype=torch.int32)))
        yield Example(cls(), (normal(1, 33), torch.tensor([0], dtype=torch.int32)))
