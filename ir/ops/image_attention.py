"""Attention of every patch to all patches of its image (arXiv:2010.11929, appendix A)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from v41c.ir.op import FLOATS, Example, Op, product, seeded
from v41c.ir.types import DType, TensorType

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 64  # keys per step of the running maximum
TILE = 512  # queries per step of the reference: bounds its memory


@dataclass(frozen=True)
class ImageAttention(Op):
    """out[t, h] = Σ_s softmax_s(scale · q[t, h] · k[s, h]) · v[s, h], s = begins[t] … min(ends[t], T) − 1

    f32 accumulation, in blocks of 64 keys from begins[t] on: running maximum, p = exp(score − maximum) rounded to the
    dtype of qkv for the value product only, unrounded p summed; the quotient is rounded once. The heads of qkv are
    those of q, of k and of v. Patches of an image follow one another and share begin and end.
    """

    scale: float

    def infer(self, qkv: TensorType, begins: TensorType, ends: TensorType) -> TensorType:
        self.require_dtype("qkv", qkv, *FLOATS)
        self.require_rank("qkv", qkv, 3)
        tokens, heads, width = qkv.shape
        self.require(int(heads) % 3 == 0, "heads of qkv", "a multiple of 3", heads)
        for name, operand in (("begins", begins), ("ends", ends)):
            self.require_dtype(name, operand, DType.I32)
            self.require_shape(name, operand, tokens)
        return TensorType(qkv.dtype, (tokens, int(heads) // 3, width))

    def reference(self, qkv: Tensor, begins: Tensor, ends: Tensor) -> Tensor:
        import torch

        q, k, v = (part.transpose(0, 1).float() for part in qkv.chunk(3, 1))  # [H, T, HD]
        out = torch.empty_like(q)
        tokens, start = q.shape[1], 0
        while start < tokens:
            begin, end = int(begins[start]), min(int(ends[start]), tokens)
            for first in range(start, end, TILE):
                tile = slice(first, min(first + TILE, end))
                out[:, tile] = self._attend(q[:, tile], k[:, begin:end], v[:, begin:end], qkv.dtype)
            start = end
        return out.transpose(0, 1).to(qkv.dtype)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, dtype: object) -> Tensor:
        import torch

        maximum = torch.full_like(q[..., :1], -torch.inf)
        total, acc = torch.zeros_like(maximum), torch.zeros_like(q)
        for begin in range(0, k.shape[1], BLOCK):
            block = slice(begin, begin + BLOCK)
            scores = (q @ k[:, block].transpose(1, 2)) * self.scale
            highest = torch.maximum(maximum, scores.amax(-1, keepdim=True))
            decay, p = (maximum - highest).exp(), (scores - highest).exp()
            total = total * decay + p.sum(-1, keepdim=True)
            acc = acc * decay + p.to(dtype).float() @ v[:, block]  # type: ignore[call-overload]
            maximum = highest
        return acc / total

    def flops(self, qkv: TensorType, begins: TensorType, ends: TensorType) -> int:
        """As if all patches were of one image."""
        return 4 * product(*qkv.shape) // 3 * int(qkv.shape[0])

    @classmethod
    def examples(cls) -> Iterator[Example]:
        import torch

        normal = seeded(46)
        for lengths, heads, width, dtype in (
            ((5, 9), 2, 16, "bf16"),
            ((1, 90, 3), 3, 64, "bf16"),
            ((7, 70), 1, 40, "f32"),
        ):
            ends = torch.tensor(lengths).cumsum(0).repeat_interleave(torch.tensor(lengths))
            begins = ends - torch.tensor(lengths).repeat_interleave(torch.tensor(lengths))
            qkv = normal(sum(lengths), 3 * heads, width, dtype=dtype)
            yield Example(cls(width**-0.5), (qkv, begins.int(), ends.int()))
