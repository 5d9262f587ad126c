"""Elementwise sum."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from v41c.ir.op import FLOATS, Example, Op, seeded
from v41c.ir.types import DType, TensorType

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Add(Op):
    """out[t, d] = x[t, d] + y[t, d]

    f32, rounded once to `out`.
    """

    out: str

    def infer(self, x: TensorType, y: TensorType) -> TensorType:
        self.require_dtype("x", x, *FLOATS)
        self.require_dtype("y", y, *FLOATS)
        self.require_shape("y", y, *x.shape)
        return TensorType(DType(self.out), x.shape)

    def reference(self, x: Tensor, y: Tensor) -> Tensor:
        total = x.float() + y.float()
        return total if self.out == "f32" else total.bfloat16()

    def flops(self, x: TensorType, y: TensorType) -> int:
        return x.elements

    @classmethod
    def examples(cls) -> Iterator[Example]:
        normal = seeded(12)
        yield Example(cls("bf16"), (normal(3, 40), normal(3, 40, dtype="bf16")))
        yield Example(cls("f32"), (normal(1, 33), normal(1, 33)))
