"""Choice of experts and their weights (DeepSeek-V3 report, arXiv:2412.19437, section 2.1.2)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from v41c.ir.op import Example, Op, seeded
from v41c.ir.types import DType, TensorType, f32, i32

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Route(Op):
    """s = score(logits / temperature);  ids[t] = `experts` largest of s + bias, ascending;  w = s[ids] (/ Σ) · scale

    f32. `score` is sqrtsoftplus, sigmoid or softmax. The bias chooses and does not weigh; tokens of an image use
    `image_bias`. Weights are divided by their sum + 1e-20 if `normalize` and more than one expert is chosen. Ties go to
    the lower expert.
    """

    experts: int
    score: str
    scale: float
    temperature: float
    normalize: bool

    def infer(
        self,
        logits: TensorType,
        bias: TensorType,
        image_bias: TensorType | None = None,
        image: TensorType | None = None,
    ) -> tuple[TensorType, TensorType]:
        self.require_dtype("logits", logits, DType.F32)
        self.require_rank("logits", logits, 2)
        tokens, count = logits.shape
        self.require_dtype("bias", bias, DType.F32)
        self.require_shape("bias", bias, count)
        self.require(self.experts <= int(count), "experts", f"at most {count}", self.experts)
        self.require((image is None) == (image_bias is None), "image", "present iff image_bias is", image)
        if image is not None and image_bias is not None:
            self.require_dtype("image", image, DType.BOOL)
            self.require_shape("image", image, tokens)
            self.require_dtype("image_bias", image_bias, DType.F32)
            self.require_shape("image_bias", image_bias, count)
        chosen = (tokens, self.experts)
        return i32(*chosen), f32(*chosen)

    def reference(
        self, logits: Tensor, bias: Tensor, image_bias: Tensor | None = None, image: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        import torch

        scaled = logits / self.temperature
        if self.score == "sqrtsoftplus":
            s = torch.nn.functional.softplus(scaled).sqrt()
        else:
            s = scaled.sigmoid() if self.score == "sigmoid" else scaled.softmax(-1)
        biased = s + bias
        if image is not None and image_bias is not None:
            biased = torch.where(image.unsqueeze(1), s + image_bias, biased)
        ids = biased.sort(dim=1, descending=True, stable=True).indices[:, : self.experts].sort(1).values
        weights = s.gather(1, ids)
        if self.normalize and self.experts > 1:
            weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
        return ids.int(), weights * self.scale

    def flops(
        self,
        logits: TensorType,
        bias: TensorType,
        image_bias: TensorType | None = None,
        image: TensorType | None = None,
    ) -> int:
        return 4 * logits.elements

    @classmethod
    def examples(cls) -> Iterator[Example]:
        import torch

        normal = seeded(19)
        for score in ("sqrtsoftplus", "sigmoid", "softmax"):
            yield Example(cls(3, score, 1.5, 1.0, True), (normal(5, 9), normal(9, scale=0.1), None, None))
        image = torch.tensor([False, True, True])
        yield Example(cls(2, "sqrtsoftplus", 2.5, 0.5, False), (normal(3, 24), normal(24), normal(24), image))
        yield Example(cls(1, "sqrtsoftplus", 1.5, 1.0, True), (normal(1, 384), normal(384, scale=0.1), None, None))
