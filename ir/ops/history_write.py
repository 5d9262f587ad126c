"""Write of compressed ids into the Engram history of their sequence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from v41c.ir.op import Example, Op
from v41c.ir.ops.window_write import newest_rows
from v41c.ir.types import DType, TensorType

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class HistoryWrite(Op):
    """history[slots[t], positions[t] mod L] = ids[t], later tokens over earlier ones

    Integer. L is the length of the ring `history` [S, L].
    """

    states: ClassVar[tuple[str, ...]] = ("history",)

    def infer(self, history: TensorType, ids: TensorType, positions: TensorType, slots: TensorType) -> TensorType:
        self.require_dtype("history", history, DType.I32)
        self.require_rank("history", history, 2)
        self.require_dtype("ids", ids, DType.I32)
        self.require_rank("ids", ids, 1)
        for name, operand in (("positions", positions), ("slots", slots)):
            self.require_shape(name, operand, *ids.shape)
        return history

    def reference(self, history: Tensor, ids: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        kept = newest_rows(slots, positions, history.shape[1])
        history[slots[kept].long(), positions[kept].long() % history.shape[1]] = ids[kept]
        return history

    def flops(self, history: TensorType, ids: TensorType, positions: TensorType, slots: TensorType) -> int:
        return 0

    def touched(
        self, history: TensorType, ids: TensorType, positions: TensorType, slots: TensorType
    ) -> Mapping[str, int]:
        return {"history": min(ids.size_bytes, history.size_bytes)}

    @classmethod
    def examples(cls) -> Iterator[Example]:
        import torch

        def ints(*values: int) -> Tensor:
            return torch.tensor(values, dtype=torch.int32)

        history = ints(5, 9, 11, 3, 4, 8).view(2, 3)
        yield Example(cls(), (history, ints(7), ints(4), ints(1)))
        yield Example(cls(), (history, ints(7, -1, 6, 4, 12), ints(3, 4, 5, 6, 30), ints(0, 0, 0, 0, 1)))
