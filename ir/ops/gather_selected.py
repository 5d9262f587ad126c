"""Selected rows of a compressed cache, dequantised, for attention of several layers to read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from v41c.ir import formats
from v41c.ir.op import Example, Op, seeded
from v41c.ir.types import DType, TensorType, f32

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class GatherSelected(Op):
    """out[t, i] = compressed[slots[t], the i-th entry of selection[t] that is not negative];  zeros behind the last one

    f32, exact: the values of packed rows (`fp4_e4m3_16`), or the rows of an f32 cache. A row has `width` elements and
    zeros up to `stride`: rows a power of two apart would share sets of a processor's cache.
    """

    width: int
    stride: int

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
        self.require(self.stride >= self.width, "stride", f"at least {self.width}", self.stride)
        return f32(*selection.shape, self.stride)

    def reference(self, compressed: Tensor, selection: Tensor, slots: Tensor) -> Tensor:
        import torch

        order = (selection < 0).int().argsort(dim=1, stable=True)
        chosen = selection.long().gather(1, order)
        rows = compressed[slots.long().unsqueeze(1), chosen.clamp_min(0)]
        values = formats.read_rows(rows, "fp4_e4m3_16", self.width)
        values = values.masked_fill((chosen < 0).unsqueeze(-1), 0.0)
        return torch.nn.functional.pad(values, (0, self.stride - self.width))

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
        for tokens, width, stride, packed in ((1, 64, 80, True), (5, 32, 32, True), (3, 64, 67, False)):
            rows = normal(2, 12, width)
            selection = normal(tokens, 12).argsort(1)[:, :5].sort(1).values.int()
            selection[-1, 3:] = -1
            selection[0, 1] = -1
            slots = torch.arange(tokens, dtype=torch.int32) % 2
            yield Example(cls(width, stride), (formats.pack(rows, "fp4_e4m3_16") if packed else rows, selection, slots))
