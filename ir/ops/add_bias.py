"""A learned offset for every column."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from v41c.ir.op import FLOATS, Example, Op, seeded
from v41c.ir.types import DType, TensorType

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class AddBias(Op):
    """out[t, m] = x[t, m] + bias[m]

    f32, rounded once to `out`.
    """

    out: str

    def infer(self, x: TensorType, bias: TensorType) -> TensorType:
        self.require_dtype("x", x, *FLOATS)
        self.require_rank("x", x, 2)
        self.require_dtype("bias", bias, *FLOATS)
        self.require_shape("bias", bias, x.shape[1])
        return TensorType(DType(self.out), x.shape)

    def reference(self, x: Tensor, bias: Tensor) -> Tensor:
        total = x.float() + bias.float()
        return total if self.out == "f32" else total.bfloat16()

    def flops(self, x: TensorType, bias: TensorType) -> int:
        return x.elements

    @classmethod
    def examples(cls) -> Iterator[Example]:
        normal = seeded(40)
        yield Example(cls("bf16"), (normal(3, 40), normal(40, dtype="bf16")))
        yield Example(cls("f32"), (normal(1, 33), normal(33)))
