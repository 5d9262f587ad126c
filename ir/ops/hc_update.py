"""Update of the residual stream by a sublayer's output (DeepSeek-V4.1 report, section 2.4.1)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from v41c.ir.op import FLOATS, Example, Op, seeded
from v41c.ir.types import DType, TensorType

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class HcUpdate(Op):
    """out[t, j, d] = post[t, j] · y[t, d] + Σ_k comb[t, k, j] · stream[t, k, d]

    f32 accumulation, rounded to the stream's dtype.
    """

    def infer(self, stream: TensorType, y: TensorType, post: TensorType, comb: TensorType) -> TensorType:
        self.require_dtype("stream", stream, *FLOATS)
        self.require_rank("stream", stream, 3)
        tokens, copies, width = stream.shape
        self.require_dtype("y", y, stream.dtype)
        self.require_shape("y", y, tokens, width)
        self.require_dtype("post", post, DType.F32)
        self.require_shape("post", post, tokens, copies)
        self.require_dtype("comb", comb, DType.F32)
        self.require_shape("comb", comb, tokens, copies, copies)
        return stream

    def reference(self, stream: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        x = stream.float()
        mixed = post.unsqueeze(-1) * y.unsqueeze(1).float() + (comb.unsqueeze(-1) * x.unsqueeze(2)).sum(1)
        return mixed.to(stream.dtype)

    def flops(self, stream: TensorType, y: TensorType, post: TensorType, comb: TensorType) -> int:
        return 2 * stream.elements * (int(stream.shape[1]) + 1)

    @classmethod
    def examples(cls) -> Iterator[Example]:
        normal = seeded(5)
        for tokens, copies, width, dtype in ((3, 4, 40, "bf16"), (1, 2, 33, "f32")):
            yield Example(
                cls(),
                (
                    normal(tokens, copies, width, dtype=dtype),
                    normal(tokens, width, dtype=dtype),
                    normal(tokens, copies).sigmoid(),
                    normal(tokens, copies, copies).softmax(-1),
                ),
            )
