"""Root-mean-square normalisation (arXiv:1910.07467, eq. 4)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from v41c.ir.op import FLOATS, Example, Op, seeded
from v41c.ir.types import TensorType

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class RmsNorm(Op):
    """out[t, d] = weight[d] · x[t, d] · rsqrt(mean_d(x[t, d]²) + eps)

    f32 accumulation, rounded once to the dtype of x.
    """

    eps: float

    def infer(self, x: TensorType, weight: TensorType) -> TensorType:
        self.require_dtype("x", x, *FLOATS)
        self.require_dtype("weight", weight, *FLOATS)
        self.require_rank("x", x, 2)
        self.require_shape("weight", weight, x.shape[1])
        return x

    def reference(self, x: Tensor, weight: Tensor) -> Tensor:
        import torch

        y = x.float()
        return (weight.float() * (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps))).to(x.dtype)

    def flops(self, x: TensorType, weight: TensorType) -> int:
        return 4 * x.elements

    @classmethod
    def examples(cls) -> Iterator[Example]:
        normal = seeded(6)
        yield Example(cls(1e-20), (normal(3, 40, dtype="bf16"), normal(40, dtype="bf16")))
        yield Example(cls(1e-6), (normal(1, 33), normal(33)))
