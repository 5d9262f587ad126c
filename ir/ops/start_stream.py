"""The residual stream after the embedding (DeepSeek-V4.1 report, section 2.4.1)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from v41c.ir.op import FLOATS, Example, Op, seeded
from v41c.ir.types import TensorType, f32

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class StartStream(Op):
    """stream[t, n, d] = x[t, d];  mix[t, n] = 1 if n == 0 else 0

    No accumulation: all copies of the stream are equal, and the first sublayer reads copy 0.
    """

    copies: int

    def infer(self, x: TensorType) -> tuple[TensorType, TensorType]:
        self.require_dtype("x", x, *FLOATS)
        self.require_rank("x", x, 2)
        tokens, width = x.shape
        return TensorType(x.dtype, (tokens, self.copies, width)), f32(tokens, self.copies)

    def reference(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mix = x.new_zeros(x.shape[0], self.copies).float()
        mix[:, 0] = 1.0
        return x.unsqueeze(1).repeat(1, self.copies, 1), mix

    def flops(self, x: TensorType) -> int:
        return 0

    @classmethod
    def examples(cls) -> Iterator[Example]:
        normal = seeded(2)
        yield Example(cls(4), (normal(3, 40, dtype="bf16"),))
        yield Example(cls(2), (normal(1, 17),))
