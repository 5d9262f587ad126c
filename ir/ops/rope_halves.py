"""Rotary position embedding that pairs the halves of a head (arXiv:2104.09864; pairs as in arXiv:2204.06745)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from v41c.ir.op import FLOATS, Example, Op, product, seeded
from v41c.ir.types import DType, TensorType

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class RopeHalves(Op):
    """(a, b) → (a·cos − b·sin, b·cos + a·sin), a and b the halves of a head, of the first `heads` heads; others = x

    f32, rounded to the dtype of x.
    """

    heads: int

    def infer(self, x: TensorType, cos: TensorType, sin: TensorType) -> TensorType:
        self.require_dtype("x", x, *FLOATS)
        self.require_rank("x", x, 3)
        self.require(self.heads <= int(x.shape[1]), "heads", f"at most {x.shape[1]}", self.heads)
        for name, table in (("cos", cos), ("sin", sin)):
            self.require_dtype(name, table, DType.F32)
            self.require_rank(name, table, 2)
            self.require(
                2 * int(table.shape[1]) == x.shape[2], f"{name} pairs", f"half of {x.shape[2]}", table.shape[1]
            )
            self.require_shape(name, table, x.shape[0], table.shape[1])
        return x

    def reference(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        import torch

        c, s = cos.unsqueeze(1), sin.unsqueeze(1)
        a, b = x[:, : self.heads].float().chunk(2, -1)
        turned = torch.cat((a * c - b * s, b * c + a * s), -1).to(x.dtype)
        return torch.cat((turned, x[:, self.heads :]), 1)

    def flops(self, x: TensorType, cos: TensorType, sin: TensorType) -> int:
        return 6 * self.heads * product(x.shape[0], cos.shape[1])

    @classmethod
    def examples(cls) -> Iterator[Example]:
        normal = seeded(43)
        for heads, shape, dtype in ((4, (3, 6, 16), "bf16"), (2, (2, 3, 64), "bf16"), (2, (4, 3, 40), "f32")):
            angle = normal(shape[0], shape[2] // 2) * 3
            yield Example(cls(heads), (normal(*shape, dtype=dtype), angle.cos(), angle.sin()))
