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
from v41c.ir.types import DType, TensorType, f32

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
        self.require_dtype("rows", rows, DType.F32)
        self.require_rank("rows", rows, 3)
        self.require_shape("rows", rows, *selection.shape, rows.shape[2])
        width = int(q.shape[-1])
        self.require(int(rows.shape[2]) >= width, "rows", f"at least {width} elements each", rows.shape[2])
        step = (q, kv, sink, window, positions, slots, starts, first, cos, sin)
        ring, out = self._attend.infer_results((*step, f32(*selection.shape, width), selection))
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
        counts = (selection >= 0).sum(1, keepdim=True)
        places = torch.arange(selection.shape[1]).expand_as(selection)
        places = places.where(places < counts, -1).int()
        step = (positions, tokens, starts, first)
        rotated = Rope(False).reference(q, cos, sin)
        attention = Attention(self.scale, causal=True)
        attended = attention.reference(rotated, kv, sink, window[slots.long()], *step, rows[..., : q.shape[-1]], places)
        ring = WindowWrite().reference(window, kv, positions, slots)
        return ring, Rope(True).reference(attended, cos, sin)

    def flops(self, *operands: TensorType) -> int:
        return self._attend.flops(*self._of_attend(*operands))

    def touched(self, *operands: TensorType) -> Mapping[str, int]:
        touched = self._attend.touched(*self._of_attend(*operands))
        return {name: size for name, size in touched.items() if name != "compressed"}

    def _of_attend(self, *operands: TensorType) -> tuple[TensorType, ...]:
        """The operands that `attend` would have on a cache of the gathered rows."""
        *step, rows, selection = operands
        return (*step, f32(*rows.shape[:2], step[0].shape[2]), selection)

    @classmethod
    def examples(cls) -> Iterator[Example]:
        for example in Attend.examples():
            *step, compressed, selection = example.operands
            if compressed is not None and selection is not None and step[0] is not None:
                width = int(step[0].shape[2])
                gather = GatherSelected(width, width + 16)
                rows = gather.reference(compressed, selection, step[5])  # type: ignore[arg-type]  # slots are there
                yield Example(cls(example.op.attributes()["scale"]), (*step, rows, selection))
