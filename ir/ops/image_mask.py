"""Which tokens belong to an image span."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from v41c.ir.op import Example, Op
from v41c.ir.types import DType, TensorType

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ImageMask(Op):
    """out[t] = tokens[t] == image_token

    Integer: every position of a span carries the image token.
    """

    image_token: int

    def infer(self, tokens: TensorType) -> TensorType:
        self.require_dtype("tokens", tokens, DType.I32)
        self.require_rank("tokens", tokens, 1)
        return TensorType(DType.BOOL, tokens.shape)

    def reference(self, tokens: Tensor) -> Tensor:
        return tokens == self.image_token

    def flops(self, tokens: TensorType) -> int:
        return 0

    @classmethod
    def examples(cls) -> Iterator[Example]:
        import torch

        yield Example(cls(7), (torch.tensor([3, 7, 7, 0], dtype=torch.int32),))
