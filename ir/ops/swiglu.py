"""Clamped gated activation (arXiv:2002.05202; clamps of the DeepSeek-V4.1 release)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from v41c.ir.op import FLOATS, Example, Op, seeded
from v41c.ir.types import TensorType

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Swiglu(Op):
    """out[t, m] = silu(min(gate[t, m], limit)) · clamp(up[t, m], −limit, limit)

    f32, rounded once to the dtype of gate.
    """

    limit: float

    def infer(self, gate: TensorType, up: TensorType) -> TensorType:
        self.require_dtype("gate", gate, *FLOATS)
        self.require_rank("gate", gate, 2)
        self.require_dtype("up", up, gate.dtype)
        self.require_shape("up", up, *gate.shape)
        return gate

    def reference(self, gate: Tensor, up: Tensor) -> Tensor:
        return gated(gate, up, self.limit).to(gate.dtype)

    def flops(self, gate: TensorType, up: TensorType) -> int:
        return 4 * gate.elements

    @classmethod
    def examples(cls) -> Iterator[Example]:
        normal = seeded(20)
        yield Example(cls(2.0), (normal(3, 40, scale=2, dtype="bf16"), normal(3, 40, scale=2, dtype="bf16")))
        yield Example(cls(10.0), (normal(1, 33, scale=8), normal(1, 33, scale=8)))


def gated(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """silu(min(gate, limit)) · clamp(up, −limit, limit) in f32."""
    import torch

    return torch.nn.functional.silu(gate.float().clamp_max(limit)) * up.float().clamp(-limit, limit)
