"""Attention with its rotations over selected rows that were gathered before (DeepSeek-V4.1 report, section 2.3)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from v41c.ir.op import Example, Op
from v41c.ir.ops.attend import Attend
from v41c.ir.ops.attention import Attention
from v41c.ir.ops.gather_selected import GatherSelected
from v41c.ir.ops.rope import Rope
from v41c.ir.ops.window_write import WindowWrite
from v41c.ir.types import TensorType

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class AttendGathered(Op):
    """out, window = attend(q, kv, …, window, …) with `rows` = gather_selected(compressed, selection, slots)

    The entries of a token, their order and every rounding are those of `attend`: the rows hold the same values.
    """

    scale: float
    traced: ClassVar[bool] = False
    states: ClassVar[tuple[str, ...]] = ("window",)

    def infer(
        self,
        q: TensorType,
        kv: TensorType,
        sink: TensorType,
        window: TensorType,
        positions: TensorType,
        slots: TensorType,
        starts: TensorType,
        first: TensorType,
        cos: TensorType,
        sin: TensorType,
        rows: TensorType,
        selection: TensorType,
    ) -> tuple[TensorType, TensorType]:
        self.require_shape("rows", rows, *selection.shape, q.shape[-1])
        step = (q, kv, sink, window, positions, slots, starts, first, cos, sin)
        ring, out = self._attend.infer_results((*step, rows, selection))
        return ring, out

    @property
    def _attend(self) -> Attend:
        """The operation on a cache whose slot is the token and whose row is the place in the selection."""
        return Attend(self.scale)

    def reference(
        self,
        q: Tensor,
        kv: Tensor,
        sink: Tensor,
        window: Tensor,
        positions: Tensor,
        slots: Tensor,
        starts: Tensor,
        first: Tensor,
        cos: Tensor,
        sin: Tensor,
        rows: Tensor,
        selection: Tensor,
    ) -> tuple[Tensor, Tensor]:
        import torch

        tokens = torch.arange(len(slots), dtype=torch.int32)
        places = torch.where(selection < 0, -1, torch.arange(selection.shape[1])).int()
        step = (positions, tokens, starts, first)
        rotated = Rope(False).reference(q, cos, sin)
        attention = Attention(self.scale, causal=True)
        attended = attention.reference(rotated, kv, sink, window[slots.long()], *step, rows, places)
        ring = WindowWrite().reference(window, kv, positions, slots)
        return ring, Rope(True).reference(attended, cos, sin)

    def flops(self, *operands: TensorType) -> int:
        return self._attend.flops(*operands)

    def touched(self, *operands: TensorType) -> Mapping[str, int]:
        touched = self._attend.touched(*operands)
        return {name: size for name, size in touched.items() if name != "compressed"}

    @classmethod
    def examples(cls) -> Iterator[Example]:
        for example in Attend.examples():
            *step, compressed, selection = example.operands
            if compressed is not None and selection is not None and step[0] is not None:
                gather = GatherSelected(int(step[0].shape[2]))
                rows = gather.reference(compressed, selection, step[5])  # type: ignore[arg-type]  # slots are there
                yield Example(cls(example.op.attributes()["scale"]), (*step, rows, selection))
