"""Mean over the residual copies: what the draft head reads (DeepSeek-V4.1 report, section 2.4.3)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from v41c.ir.op import FLOATS, Example, Op, seeded
from v41c.ir.types import TensorType

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class StreamMean(Op):
    """out[t, d] = (1 / N) Σ_n stream[t, n, d]

    f32 accumulation, rounded to the stream's dtype.
    """

    def infer(self, stream: TensorType) -> TensorType:
        self.require_dtype("stream", stream, *FLOATS)
        self.require_rank("stream", stream, 3)
        return TensorType(stream.dtype, (stream.shape[0], stream.shape[2]))

    def reference(self, stream: Tensor) -> Tensor:
        return stream.float().mean(1).to(stream.dtype)

    def flops(self, stream: TensorType) -> int:
        return stream.elements

    @classmethod
    def examples(cls) -> Iterator[Example]:
        normal = seeded(25)
        yield Example(cls(), (normal(3, 4, 40, dtype="bf16"),))
        yield Example(cls(), (normal(1, 2, 33),))
