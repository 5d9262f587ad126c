"""Write of window keys into the ring of their sequence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from v41c.ir import formats
from v41c.ir.op import FLOATS, Example, Op, seeded
from v41c.ir.types import DType, TensorType

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class WindowWrite(Op):
    """window[slots[t], positions[t] mod W] = pack(kv[t]), later tokens over earlier ones

    A u8 ring stores `fp8_e8m0_32` rows (exact for values that went through that round trip), an f32 ring plain rows.
    """

    states: ClassVar[tuple[str, ...]] = ("window",)

    def infer(self, window: TensorType, kv: TensorType, positions: TensorType, slots: TensorType) -> TensorType:
        self.require_dtype("kv", kv, *FLOATS)
        self.require_rank("kv", kv, 2)
        self.require_rank("window", window, 3)
        self.require_dtype("window", window, DType.U8, DType.F32)
        width = int(kv.shape[1])
        row = formats.FORMATS["fp8_e8m0_32"].row_bytes(width) if window.dtype == DType.U8 else width
        self.require_shape("window", window, *window.shape[:2], row)
        self.require_shape("positions", positions, kv.shape[0])
        self.require_shape("slots", slots, kv.shape[0])
        return window

    def reference(self, window: Tensor, kv: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        rows = formats.write_rows(kv, "fp8_e8m0_32", window)
        length = window.shape[1]
        kept = newest_rows(slots, positions, length)
        window[slots[kept].long(), positions[kept].long() % length] = rows[kept]
        return window

    def flops(self, window: TensorType, kv: TensorType, positions: TensorType, slots: TensorType) -> int:
        return 2 * kv.elements

    def touched(
        self, window: TensorType, kv: TensorType, positions: TensorType, slots: TensorType
    ) -> Mapping[str, int]:
        written = min(int(kv.shape[0]), int(window.shape[0]) * int(window.shape[1]))
        return {"window": TensorType(window.dtype, (written, window.shape[2])).size_bytes}

    @classmethod
    def examples(cls) -> Iterator[Example]:
        import torch

        normal = seeded(14)
        for tokens, dtype in ((1, "u8"), (3, "u8"), (21, "u8"), (5, "f32")):
            positions = torch.arange(tokens, dtype=torch.int32) + 6
            slots = torch.ones(tokens, dtype=torch.int32)
            kv = formats.round_trip(normal(tokens, 64, dtype="bf16"), "fp8_e8m0_32")
            old = normal(2, 8, 64)
            window = formats.pack(old, "fp8_e8m0_32") if dtype == "u8" else old
            yield Example(cls(), (window, kv if dtype == "u8" else kv.float(), positions, slots))


def newest_rows(slots: Tensor, positions: Tensor, length: int) -> Tensor:
    """Rows bool [T] that no later token of their run overwrites in a ring of `length` positions.

    An indexed store with repeated indices has no order, so only these are stored.
    """
    import torch

    kept = torch.ones(len(positions), dtype=torch.bool)
    ahead = slice(length, None)
    behind = slice(None, max(len(positions) - length, 0))
    kept[behind] = (slots[ahead] != slots[behind]) | (positions[ahead] != positions[behind] + length)
    return kept
