"""Gaussian error linear unit, exact (arXiv:1606.08415, section 2)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from v41c.ir.op import FLOATS, Example, Op, seeded
from v41c.ir.types import TensorType

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Gelu(Op):
    """out[t, m] = x[t, m] · (1 + erf(x[t, m] / √2)) / 2

    f32, rounded once to the dtype of x.
    """

    def infer(self, x: TensorType) -> TensorType:
        self.require_dtype("x", x, *FLOATS)
        self.require_rank("x", x, 2)
        return x

    def reference(self, x: Tensor) -> Tensor:
        import torch

        return torch.nn.functional.gelu(x.float()).to(x.dtype)

    def flops(self, x: TensorType) -> int:
        return 4 * x.elements

    @classmethod
    def examples(cls) -> Iterator[Example]:
        normal = seeded(41)
        yield Example(cls(), (normal(3, 40, scale=2, dtype="bf16"),))
        yield Example(cls(), (normal(2, 33, scale=3),))
