"""Collapse of the residual copies to one sublayer input (DeepSeek-V4.1 report, section 2.4.1)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from v41c.ir.op import FLOATS, Example, Op, seeded
from v41c.ir.types import DType, TensorType

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class HcMix(Op):
    """out[t, d] = Σ_n pre[t, n] · stream[t, n, d]

    f32 accumulation over the copies in ascending order, rounded to the stream's dtype.
    """

    def infer(self, stream: TensorType, pre: TensorType) -> TensorType:
        self.require_dtype("stream", stream, *FLOATS)
        self.require_rank("stream", stream, 3)
        self.require_dtype("pre", pre, DType.F32)
        self.require_shape("pre", pre, *stream.shape[:2])
        return TensorType(stream.dtype, (stream.shape[0], stream.shape[2]))

    def reference(self, stream: Tensor, pre: Tensor) -> Tensor:
        return (pre.unsqueeze(-1) * stream.float()).sum(1).to(stream.dtype)

    def flops(self, stream: TensorType, pre: TensorType) -> int:
        return 2 * stream.elements

    @classmethod
    def examples(cls) -> Iterator[Example]:
        normal = seeded(4)
        yield Example(cls(), (normal(3, 4, 40, dtype="bf16"), normal(3, 4).sigmoid()))
        yield Example(cls(), (normal(1, 2, 33), normal(1, 2).sigmoid()))
