"""Token ids in the Engram's smaller id space (DeepSeek-V4.1 report, section 2.2: Engram)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from v41c.ir.op import Example, Op
from v41c.ir.types import DType, TensorType

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class CompressTokens(Op):
    """out[t] = −1 if tokens[t] == image_token else table[tokens[t]]

    Integer.
    """

    image_token: int

    def infer(self, tokens: TensorType, table: TensorType) -> TensorType:
        self.require_dtype("tokens", tokens, DType.I32)
        self.require_rank("tokens", tokens, 1)
        self.require_dtype("table", table, DType.I32)
        self.require_rank("table", table, 1)
        return tokens

    def reference(self, tokens: Tensor, table: Tensor) -> Tensor:
        import torch

        return torch.where(tokens == self.image_token, -1, table[tokens.long()])

    def flops(self, tokens: TensorType, table: TensorType) -> int:
        return 0

    def touched(self, tokens: TensorType, table: TensorType) -> Mapping[str, int]:
        return {"table": tokens.size_bytes}

    @classmethod
    def examples(cls) -> Iterator[Example]:
        import torch

        tokens = torch.tensor([3, 7, 7, 0, 10], dtype=torch.int32)
        yield Example(cls(7), (tokens, torch.arange(11, dtype=torch.int32) // 2))
