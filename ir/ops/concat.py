"""Two tensors side by side."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from v41c.ir.op import Example, Op, seeded
from v41c.ir.types import TensorType

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Concat(Op):
    """out[t, :A] = x[t, :];  out[t, A:] = y[t, :]

    No arithmetic.
    """

    def infer(self, x: TensorType, y: TensorType) -> TensorType:
        self.require_rank("x", x, 2)
        self.require_rank("y", y, 2)
        self.require_dtype("y", y, x.dtype)
        self.require(x.shape[0] == y.shape[0], "rows of y", x.shape[0], y.shape[0])
        return TensorType(x.dtype, (x.shape[0], int(x.shape[1]) + int(y.shape[1])))

    def reference(self, x: Tensor, y: Tensor) -> Tensor:
        import torch

        return torch.cat((x, y), -1)

    def flops(self, x: TensorType, y: TensorType) -> int:
        return 0

    @classmethod
    def examples(cls) -> Iterator[Example]:
        normal = seeded(11)
        yield Example(cls(), (normal(3, 40, dtype="bf16"), normal(3, 7, dtype="bf16")))
        yield Example(cls(), (normal(1, 5), normal(1, 24)))
