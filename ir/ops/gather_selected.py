"""Selected rows of a compressed cache, dequantised, for attention of several layers to read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from v41c.ir import formats
from v41c.ir.op import Example, Op, seeded
from v41c.ir.types import DType, TensorType

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class GatherSelected(Op):
    """out[t, i] = compressed[slots[t], selection[t, i]], zeros where the selection is negative

    Exact: a packed row (`fp4_e4m3_16`) holds products of two and four significant bits, which bf16 represents; rows of
    an f32 cache are copied. A row has `width` elements.
    """

    width: int

    def infer(self, compressed: TensorType, selection: TensorType, slots: TensorType) -> TensorType:
        self.require_dtype("compressed", compressed, DType.U8, DType.F32)
        self.require_rank("compressed", compressed, 3)
        packed = compressed.dtype == DType.U8
        row = formats.FORMATS["fp4_e4m3_16"].row_bytes(self.width) if packed else self.width
        self.require_shape("compressed", compressed, *compressed.shape[:2], row)
        self.require_dtype("selection", selection, DType.I32)
        self.require_rank("selection", selection, 2)
        self.require_dtype("slots", slots, DType.I32)
        self.require_shape("slots", slots, selection.shape[0])
        return TensorType(DType.BF16 if packed else DType.F32, (*selection.shape, self.width))

    def reference(self, compressed: Tensor, selection: Tensor, slots: Tensor) -> Tensor:
        import torch

        chosen = selection.long()
        packed = compressed[slots.long().unsqueeze(1), chosen.clamp_min(0)]
        rows = formats.read_rows(packed, "fp4_e4m3_16", self.width).masked_fill((chosen < 0).unsqueeze(-1), 0.0)
        return rows.bfloat16() if compressed.dtype == torch.uint8 else rows

    def flops(self, compressed: TensorType, selection: TensorType, slots: TensorType) -> int:
        return selection.elements * self.width

    def touched(self, compressed: TensorType, selection: TensorType, slots: TensorType) -> Mapping[str, int]:
        chosen = min(int(selection.shape[1]), int(compressed.shape[1]))
        rows = (int(selection.shape[0]), chosen, compressed.shape[2])
        return {"compressed": TensorType(compressed.dtype, rows).size_bytes}

    @classmethod
    def examples(cls) -> Iterator[Example]:
        import torch

        normal = seeded(33)
        for tokens, width, packed in ((1, 64, True), (5, 32, True), (3, 64, False)):
            rows = normal(2, 12, width)
            selection = normal(tokens, 12).argsort(1)[:, :5].sort(1).values.int()
            selection[-1, 3:] = -1
            slots = torch.arange(tokens, dtype=torch.int32) % 2
            yield Example(cls(width), (formats.pack(rows, "fp4_e4m3_16") if packed else rows, selection, slots))
