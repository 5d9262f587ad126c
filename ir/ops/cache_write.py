"""Write of compressed rows or index keys into a global cache."""

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
class CacheWrite(Op):
    """cache[slots[t], positions[t] // ratio] = pack(x[t]) where t closes a group and positions[t] ≥ kept[t]

    A token closes a group if positions[t] mod ratio == ratio − 1. Rows of positions below `kept` stay as they are, so
    that a replay makes local state anew and nothing else.
    A u8 cache stores packed rows of `format`, an f32 cache plain rows.
    """

    ratio: int
    format: str
    states: ClassVar[tuple[str, ...]] = ("cache",)
    #: every row has its own place, whichever token comes first
    exchangeable: ClassVar[tuple[tuple[tuple[str, int], ...], ...]] = (
        (("x", 0), ("positions", 0), ("slots", 0), ("kept", 0)),
    )

    def infer(
        self, cache: TensorType, x: TensorType, positions: TensorType, slots: TensorType, kept: TensorType
    ) -> TensorType:
        self.require_dtype("x", x, *FLOATS)
        self.require_rank("x", x, 2)
        self.require_rank("cache", cache, 3)
        self.require_dtype("cache", cache, DType.U8, DType.F32)
        self.require(self.format in formats.FORMATS, "format", sorted(formats.FORMATS), self.format)
        width = int(x.shape[1])
        row = formats.FORMATS[self.format].row_bytes(width) if cache.dtype == DType.U8 else width
        self.require_shape("cache", cache, *cache.shape[:2], row)
        for name, operand in (("positions", positions), ("slots", slots), ("kept", kept)):
            self.require_shape(name, operand, x.shape[0])
        return cache

    def reference(self, cache: Tensor, x: Tensor, positions: Tensor, slots: Tensor, kept: Tensor) -> Tensor:
        closing = (positions % self.ratio == self.ratio - 1) & (positions >= kept)
        rows = formats.write_rows(x[closing], self.format, cache)
        cache[slots[closing].long(), positions[closing].long() // self.ratio] = rows
        return cache

    def flops(
        self, cache: TensorType, x: TensorType, positions: TensorType, slots: TensorType, kept: TensorType
    ) -> int:
        return 2 * x.elements

    def touched(
        self, cache: TensorType, x: TensorType, positions: TensorType, slots: TensorType, kept: TensorType
    ) -> Mapping[str, int]:
        written = -(-int(x.shape[0]) // self.ratio)
        return {"cache": TensorType(cache.dtype, (written, cache.shape[2])).size_bytes}

    @classmethod
    def examples(cls) -> Iterator[Example]:
        import torch

        normal = seeded(15)
        for tokens, ratio, format, dtype, kept in (
            (1, 1, "fp4_e4m3_16", "u8", 0),
            (7, 2, "fp4_e8m0_32", "u8", 7),
            (9, 4, "fp4_e4m3_16", "u8", 0),
            (5, 2, "fp4_e4m3_16", "f32", 5),
            (3, 1, "fp4_e4m3_16", "u8", 6),
        ):
            positions = torch.arange(tokens, dtype=torch.int32) + 3
            slots = torch.ones(tokens, dtype=torch.int32)
            old = normal(2, 16, 64)
            cache = formats.pack(old, format) if dtype == "u8" else old
            x = normal(tokens, 64, dtype="bf16")
            values = x if dtype == "u8" else x.float()
            yield Example(cls(ratio, format), (cache, values, positions, slots, slots * kept))
