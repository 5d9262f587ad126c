"""Quantisation to a group-scaled format and back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from v41c.ir import formats, packed
from v41c.ir.op import FLOATS, Example, Op, seeded
from v41c.ir.types import TensorType

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class RoundTrip(Op):
    """out[..., k] = round(x[..., k] / s) · s, s the scale of k's group

    The format's rules are in `v41c.ir.formats`; the result is exact in bf16.
    """

    format: str

    def infer(self, x: TensorType) -> TensorType:
        self.require_dtype("x", x, *FLOATS)
        self.require(self.format in formats.FORMATS, "format", sorted(formats.FORMATS), self.format)
        group = formats.FORMATS[self.format].group
        self.require(int(x.shape[-1]) % group == 0, "last axis", f"a multiple of {group}", x.shape[-1])
        return x

    def reference(self, x: Tensor) -> Tensor:
        return formats.round_trip(x, self.format)

    def packing(self) -> tuple[Op, int] | None:
        from v41c.ir.ops.pack_rows import PackRows

        return (PackRows(self.format), 0) if self.format == packed.FORMAT else None

    def flops(self, x: TensorType) -> int:
        return 3 * x.elements

    @classmethod
    def examples(cls) -> Iterator[Example]:
        import torch

        normal = seeded(9)
        for name in formats.FORMATS:
            spread = torch.exp2(normal(5, 1) * 8)
            yield Example(cls(name), ((normal(5, 96) * spread).bfloat16(),))
            yield Example(cls(name), (normal(3, 2, 64, dtype="bf16"),))
