"""Quantisation to a group-scaled format, kept packed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from v41c.errors import VerifyError
from v41c.ir import formats, packed
from v41c.ir.op import FLOATS, Example, Op, seeded
from v41c.ir.ops.round_trip import RoundTrip
from v41c.ir.types import DType, TensorType

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class PackRows(Op):
    """out[t] = codes of round(x[t, k] / s), then the scales s of the groups of k

    The bytes of u8 [T, row bytes] are those of a packed row of `v41c.ir.formats`; its values are the `round_trip` of x.
    """

    format: str
    traced: ClassVar[bool] = False

    def infer(self, x: TensorType) -> TensorType:
        self.require_dtype("x", x, *FLOATS)
        self.require_rank("x", x, 2)
        self.require(self.format in formats.FORMATS, "format", sorted(formats.FORMATS), self.format)
        rule, width = formats.FORMATS[self.format], int(x.shape[1])
        self.require(width % rule.group == 0, "last axis", f"a multiple of {rule.group}", width)
        return TensorType(DType.U8, (x.shape[0], rule.row_bytes(width)))

    def reference(self, x: Tensor) -> Tensor:
        return formats.pack(x, self.format)

    def flops(self, x: TensorType) -> int:
        return 2 * x.elements

    @classmethod
    def examples(cls) -> Iterator[Example]:
        import torch

        normal = seeded(34)
        for name in formats.FORMATS:
            spread = torch.exp2(normal(5, 1) * 8)
            yield Example(cls(name), ((normal(5, 96) * spread).bfloat16(),))
            yield Example(cls(name), (normal(3, 64),))


def rounding(format: str, to_rows: bool) -> PackRows | RoundTrip:
    """What rounds a fused operation's result to a format: as packed rows of activations, or back to floats."""
    if to_rows and format != packed.FORMAT:
        raise VerifyError(f"packed format: expected {packed.FORMAT}, got {format}")
    return PackRows(format) if to_rows else RoundTrip(format)
