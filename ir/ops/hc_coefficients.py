"""Coefficients of a residual mixing (DeepSeek-V4.1 report, section 2.4.1: Single-Pass mHC)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from v41c.ir.op import FLOATS, Example, Op, product, seeded
from v41c.ir.types import DType, TensorType, f32

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class HcCoefficients(Op):
    """m = (fn · flat(X)) / rms(flat(X));  pre, post, comb = sigmoid, 2·sigmoid, Sinkhorn of m·scale + base

    All in f32; rms(x) = √(mean x² + norm_eps); `eps` is added to pre and in the normalisations. `flat` is
    copy-major. `comb` is indexed [source copy, target copy]: a softmax over targets, then alternating
    column and row normalisations that END on columns, so columns sum to one and rows only nearly.
    """

    norm_eps: float
    eps: float
    iterations: int

    def infer(
        self, stream: TensorType, fn: TensorType, scale: TensorType, base: TensorType
    ) -> tuple[TensorType, TensorType, TensorType]:
        self.require_dtype("stream", stream, *FLOATS)
        self.require_rank("stream", stream, 3)
        tokens, copies, width = stream.shape
        outputs = (2 + int(copies)) * int(copies)
        for name, operand in (("fn", fn), ("scale", scale), ("base", base)):
            self.require_dtype(name, operand, DType.F32)
        self.require_shape("fn", fn, outputs, product(copies, width))
        self.require_shape("scale", scale, 3)
        self.require_shape("base", base, outputs)
        return f32(tokens, copies), f32(tokens, copies), f32(tokens, copies, copies)

    def reference(self, stream: Tensor, fn: Tensor, scale: Tensor, base: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        import torch

        n = stream.shape[1]
        flat = stream.flatten(1).float()
        m = torch.nn.functional.linear(flat, fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + self.norm_eps)
        pre = torch.sigmoid(m[:, :n] * scale[0] + base[:n]) + self.eps
        post = 2 * torch.sigmoid(m[:, n : 2 * n] * scale[1] + base[n : 2 * n])
        comb = (m[:, 2 * n :] * scale[2] + base[2 * n :]).unflatten(-1, (n, n)).softmax(-1) + self.eps
        comb = comb / (comb.sum(-2, keepdim=True) + self.eps)
        for _ in range(self.iterations - 1):
            comb = comb / (comb.sum(-1, keepdim=True) + self.eps)
            comb = comb / (comb.sum(-2, keepdim=True) + self.eps)
        return pre, post, comb

    def flops(self, stream: TensorType, fn: TensorType, scale: TensorType, base: TensorType) -> int:
        tokens, copies, _ = stream.shape
        return (
            2 * product(tokens, *fn.shape) + 2 * stream.elements + 4 * self.iterations * product(tokens, copies, copies)
        )

    @classmethod
    def examples(cls) -> Iterator[Example]:
        normal = seeded(3)
        for tokens, copies, width, dtype in ((3, 4, 40, "bf16"), (1, 4, 96, "bf16"), (5, 2, 33, "f32")):
            outputs = (2 + copies) * copies
            yield Example(
                cls(1e-20, 1e-6, 20),
                (
                    normal(tokens, copies, width, dtype=dtype),
                    normal(outputs, copies * width, scale=(copies * width) ** -0.5),
                    normal(3).abs() + 0.5,
                    normal(outputs),
                ),
            )
