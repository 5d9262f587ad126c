"""Gated addition of Engram values to the residual stream (DeepSeek-V4.1 report, section 2.2: Engram)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from v41c.ir.op import FLOATS, Example, Op, seeded
from v41c.ir.types import DType, TensorType

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class EngramGate(Op):
    """X_j += σ(sign(s_j)·√max(|s_j|, 1e-6)) · v;  s_j = D^-½ · Σ_d q_j w_j X_j k_j / (rms(X_j) · rms(k_j))

    f32, rounded to the stream's dtype; rms(x) = √(mean x² + eps). `kv` [T, (N+1)·D] holds
    N keys k_j and one shared value v; q and w are the learned `q_weight`, `k_weight`. Tokens of an image get nothing.
    """

    eps: float

    def infer(
        self,
        stream: TensorType,
        kv: TensorType,
        q_weight: TensorType,
        k_weight: TensorType,
        image: TensorType | None = None,
    ) -> TensorType:
        self.require_dtype("stream", stream, *FLOATS)
        self.require_rank("stream", stream, 3)
        tokens, copies, width = stream.shape
        self.require_dtype("kv", kv, *FLOATS)
        self.require_shape("kv", kv, tokens, (int(copies) + 1) * int(width))
        for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
            self.require_dtype(name, weight, *FLOATS)
            self.require_shape(name, weight, copies, width)
        if image is not None:
            self.require_dtype("image", image, DType.BOOL)
            self.require_shape("image", image, tokens)
        return stream

    def reference(
        self, stream: Tensor, kv: Tensor, q_weight: Tensor, k_weight: Tensor, image: Tensor | None = None
    ) -> Tensor:
        import torch

        n, d = stream.shape[1:]
        x = stream.float()
        parts: Tensor = kv.float().unflatten(-1, (n + 1, d))
        k, v = parts[:, :n], parts[:, n:]
        s = (x * q_weight.float() * k_weight.float() * k).sum(-1) * d**-0.5
        s = s * torch.rsqrt(x.square().mean(-1) + self.eps) * torch.rsqrt(k.square().mean(-1) + self.eps)
        gate = torch.sigmoid(torch.copysign(s.abs().clamp_min(1e-6).sqrt(), s))
        if image is not None:
            gate = gate.masked_fill(image.unsqueeze(1), 0.0)
        return (x + gate.unsqueeze(-1) * v).to(stream.dtype)

    def flops(
        self,
        stream: TensorType,
        kv: TensorType,
        q_weight: TensorType,
        k_weight: TensorType,
        image: TensorType | None = None,
    ) -> int:
        return 10 * stream.elements

    @classmethod
    def examples(cls) -> Iterator[Example]:
        import torch

        normal = seeded(23)
        for tokens, copies, width, dtype in ((3, 4, 40, "bf16"), (1, 2, 33, "f32")):
            yield Example(
                cls(1e-20),
                (
                    normal(tokens, copies, width, dtype=dtype),
                    normal(tokens, (copies + 1) * width, dtype=dtype),
                    normal(copies, width, dtype=dtype),
                    normal(copies, width, dtype=dtype),
                    torch.tensor([False, True, False]) if tokens == 3 else None,
                ),
            )
