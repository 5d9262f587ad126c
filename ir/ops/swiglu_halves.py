"""Gated activation of a projection that holds gate and up side by side (arXiv:2002.05202)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from v41c.ir.op import FLOATS, Example, Op, seeded
from v41c.ir.types import TensorType

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class SwigluHalves(Op):
    """out[t, m] = silu(x[t, m]) · x[t, M + m], M half of the width

    f32, rounded once to the dtype of x.
    """

    def infer(self, x: TensorType) -> TensorType:
        self.require_dtype("x", x, *FLOATS)
        self.require_rank("x", x, 2)
        self.require(int(x.shape[1]) % 2 == 0, "width of x", "an even number", x.shape[1])
        return TensorType(x.dtype, (x.shape[0], int(x.shape[1]) // 2))

    def reference(self, x: Tensor) -> Tensor:
        import torch

        gate, up = x.float().chunk(2, -1)
        return (torch.nn.functional.silu(gate) * up).to(x.dtype)

    def flops(self, x: TensorType) -> int:
        return 2 * x.elements

    @classmethod
    def examples(cls) -> Iterator[Example]:
        normal = seeded(42)
        yield Example(cls(), (normal(3, 80, scale=2, dtype="bf16"),))
        yield Example(cls(), (normal(1, 66, scale=3),))
