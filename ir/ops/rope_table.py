"""Rotation angles of rotary position embedding, with YaRN (arXiv:2104.09864; arXiv:2309.00071, section 3.2)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from v41c.ir.op import Example, Op, product
from v41c.ir.types import DType, TensorType, f32

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class RopeTable(Op):
    """cos[t, i] = cos(p · f_i), sin[t, i] = sin(p · f_i), p = max(positions[t] + offset, 0)

    The angle is one f32 product of the f32 position and the f32 frequency. f_i = theta^(−2i/dims); with
    original_length > 0, frequencies below the ramp are divided by `factor` (no attention temperature).
    """

    dims: int
    theta: float
    factor: float
    original_length: int
    beta_fast: float
    beta_slow: float
    offset: int

    def infer(self, positions: TensorType) -> tuple[TensorType, TensorType]:
        self.require_dtype("positions", positions, DType.I32)
        self.require_rank("positions", positions, 1)
        self.require(self.dims % 2 == 0, "dims", "an even number", self.dims)
        table = f32(positions.shape[0], self.dims // 2)
        return table, table

    def frequencies(self) -> Tensor:
        """f32 [dims/2] frequencies."""
        import math

        import torch

        f = 1.0 / (self.theta ** (torch.arange(0, self.dims, 2, dtype=torch.float32) / self.dims))
        if self.original_length == 0:
            return f

        def pair(rotations: float) -> float:
            turns = self.original_length / (rotations * 2 * math.pi)
            return self.dims * math.log(turns) / (2 * math.log(self.theta))

        low = max(math.floor(pair(self.beta_fast)), 0)
        high = min(math.ceil(pair(self.beta_slow)), self.dims - 1)
        ramp = ((torch.arange(self.dims // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)).clamp(0, 1)
        return f / self.factor * ramp + f * (1 - ramp)

    def reference(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angle = (positions + self.offset).clamp_min(0).float().unsqueeze(-1) * self.frequencies()
        return angle.cos(), angle.sin()

    def flops(self, positions: TensorType) -> int:
        return product(positions.shape[0], self.dims // 2)

    @classmethod
    def examples(cls) -> Iterator[Example]:
        import torch

        positions = torch.tensor([0, 1, 5, 1000, 65535, 1048575], dtype=torch.int32)
        yield Example(cls(64, 10000.0, 16.0, 0, 32.0, 1.0, 0), (positions,))
        yield Example(cls(64, 160000.0, 16.0, 65536, 32.0, 1.0, -1), (positions,))
        yield Example(cls(16, 160000.0, 16.0, 64, 32.0, 1.0, 0), (positions[:3],))
