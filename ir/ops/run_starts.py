"""Where each token's run starts in the step: its sequence's tokens are contiguous and consecutive."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from v41c.ir.op import Example, Op
from v41c.ir.types import DType, TensorType

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class RunStarts(Op):
    """starts[t] = starts[t−1] if slots[t] == slots[t−1] and positions[t] == positions[t−1] + 1 else t

    Integer.
    """

    def infer(self, positions: TensorType, slots: TensorType) -> TensorType:
        self.require_dtype("positions", positions, DType.I32)
        self.require_rank("positions", positions, 1)
        self.require_dtype("slots", slots, DType.I32)
        self.require_shape("slots", slots, *positions.shape)
        return positions

    def reference(self, positions: Tensor, slots: Tensor) -> Tensor:
        import torch

        rows = torch.arange(positions.shape[0], dtype=torch.int32)
        begins = torch.ones_like(rows, dtype=torch.bool)
        begins[1:] = (slots[1:] != slots[:-1]) | (positions[1:] != positions[:-1] + 1)
        return torch.where(begins, rows, 0).cummax(0).values.to(torch.int32)

    def flops(self, positions: TensorType, slots: TensorType) -> int:
        return 0

    @classmethod
    def examples(cls) -> Iterator[Example]:
        import torch

        yield Example(
            cls(),
            (torch.tensor([5, 6, 7, 3, 4, 9], dtype=torch.int32), torch.tensor([0, 0, 0, 1, 1, 1], dtype=torch.int32)),
        )
        yield Example(cls(), (torch.tensor([5], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)))
