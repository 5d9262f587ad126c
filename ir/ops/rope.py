"""Rotary position embedding of the last axes, adjacent pairs (arXiv:2104.09864)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from v41c.ir.op import FLOATS, Example, Op, product, seeded
from v41c.ir.types import DType, TensorType

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Rope(Op):
    """(a, b) → (a·cos − b·sin, a·sin + b·cos) on adjacent pairs of the last 2·len(cos) elements; the rest unchanged

    f32, rounded to the dtype of x. `inverse` rotates back (the conjugate).
    """

    inverse: bool

    def infer(self, x: TensorType, cos: TensorType, sin: TensorType) -> TensorType:
        self.require_dtype("x", x, *FLOATS)
        self.require(len(x.shape) in (2, 3), "x rank", "2 or 3", len(x.shape))
        self.require_dtype("cos", cos, DType.F32)
        self.require_rank("cos", cos, 2)
        self.require(cos.shape[0] == x.shape[0], "cos rows", x.shape[0], cos.shape[0])
        self.require(
            2 * int(cos.shape[1]) <= int(x.shape[-1]), "rotated elements", f"at most {x.shape[-1]}", cos.shape[1]
        )
        self.require_dtype("sin", sin, DType.F32)
        self.require_shape("sin", sin, *cos.shape)
        return x

    def reference(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        import torch

        if x.dim() == 3:
            cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        if self.inverse:
            sin = -sin
        kept, tail = x.split((x.shape[-1] - 2 * cos.shape[-1], 2 * cos.shape[-1]), -1)
        a, b = tail.float().unflatten(-1, (-1, 2)).unbind(-1)
        rotated = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
        return torch.cat((kept, rotated.to(x.dtype)), -1)

    def flops(self, x: TensorType, cos: TensorType, sin: TensorType) -> int:
        return 6 * product(*x.shape[:-1], cos.shape[1])

    @classmethod
    def examples(cls) -> Iterator[Example]:
        normal = seeded(13)
        for inverse in (False, True):
            for shape, dtype in (((3, 2, 40), "bf16"), ((1, 64), "bf16"), ((4, 3, 24), "f32")):
                angle = normal(shape[0], 8) * 3
                yield Example(cls(inverse), (normal(*shape, dtype=dtype), angle.cos(), angle.sin()))
