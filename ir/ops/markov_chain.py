"""Sequential draft tokens from parallel logits (DeepSeek-V4.1 report, section 2.4.3: DSpark)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from v41c.ir.op import FLOATS, Example, Op, product, seeded
from v41c.ir.types import DType, TensorType

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class MarkovChain(Op):
    """out[t] = logits[t] + head · embed[inputs[t]];  drafts[t] = argmax out[t]

    f32. inputs[t] is tokens[t] at a run's start and drafts[t−1] after it. Ties go to the lower token.
    """

    def infer(
        self, logits: TensorType, tokens: TensorType, starts: TensorType, embed: TensorType, head: TensorType
    ) -> tuple[TensorType, TensorType, TensorType]:
        self.require_dtype("logits", logits, DType.F32)
        self.require_rank("logits", logits, 2)
        for name, operand in (("tokens", tokens), ("starts", starts)):
            self.require_dtype(name, operand, DType.I32)
            self.require_shape(name, operand, logits.shape[0])
        self.require_dtype("embed", embed, *FLOATS)
        self.require_shape("embed", embed, logits.shape[1], embed.shape[-1])
        self.require_dtype("head", head, embed.dtype)
        self.require_shape("head", head, *embed.shape)
        return logits, tokens, tokens

    def reference(
        self, logits: Tensor, tokens: Tensor, starts: Tensor, embed: Tensor, head: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        out, inputs, drafts = logits.clone(), tokens.clone(), tokens.clone()
        for row in range(logits.shape[0]):
            if int(starts[row]) != row:
                inputs[row] = drafts[row - 1]
            out[row] += head.float() @ embed[int(inputs[row])].float()
            drafts[row] = out[row].argmax()
        return out, inputs, drafts

    def flops(
        self, logits: TensorType, tokens: TensorType, starts: TensorType, embed: TensorType, head: TensorType
    ) -> int:
        return 2 * product(logits.shape[0], *head.shape)

    def touched(
        self, logits: TensorType, tokens: TensorType, starts: TensorType, embed: TensorType, head: TensorType
    ) -> Mapping[str, int]:
        return {"embed": TensorType(embed.dtype, (logits.shape[0], embed.shape[1])).size_bytes}

    @classmethod
    def examples(cls) -> Iterator[Example]:
        import torch

        normal = seeded(26)
        tokens = torch.tensor([3, 0, 0, 9, 0], dtype=torch.int32)
        starts = torch.tensor([0, 0, 0, 3, 3], dtype=torch.int32)
        yield Example(
            cls(), (normal(5, 19), tokens, starts, normal(19, 24, dtype="bf16"), normal(19, 24, dtype="bf16"))
        )
        yield Example(cls(), (normal(1, 33), tokens[:1], starts[:1], normal(33, 8), normal(33, 8)))
