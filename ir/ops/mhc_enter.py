"""The entry of a sublayer in one pass over a stream that no update made (DeepSeek-V4.1 report, section 2.4.1)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from v41c.ir import formats
from v41c.ir.op import Example, Op, seeded
from v41c.ir.ops.hc_coefficients import HcCoefficients
from v41c.ir.ops.hc_mix import HcMix
from v41c.ir.ops.rms_norm import RmsNorm
from v41c.ir.types import TensorType

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class MhcEnter(Op):
    """u = norm(mix(X, pre));  pre', post', comb' = coefficients(X)

    The composition of `hc_mix`, `rms_norm` and `hc_coefficients`, with their roundings, for the first sublayer of a
    graph and for one behind an Engram, whose gate needs a whole pass of its own. `format` adds the round trip of u as
    another result ("none": no such result).
    """

    norm_eps: float
    eps: float
    iterations: int
    format: str
    traced: ClassVar[bool] = False

    def infer(
        self,
        stream: TensorType,
        pre: TensorType,
        fn: TensorType,
        scale: TensorType,
        base: TensorType,
        weight: TensorType,
    ) -> tuple[TensorType, ...]:
        mix, norm, coefficients = self.parts()
        u = norm.infer(mix.infer(stream, pre), weight)
        quantized = () if self.format == "none" else (u,)
        return u, *quantized, *coefficients.infer(stream, fn, scale, base)

    def parts(self) -> tuple[HcMix, RmsNorm, HcCoefficients]:
        """The operations this one is composed of."""
        return HcMix(), RmsNorm(self.norm_eps), HcCoefficients(self.norm_eps, self.eps, self.iterations)

    def reference(
        self, stream: Tensor, pre: Tensor, fn: Tensor, scale: Tensor, base: Tensor, weight: Tensor
    ) -> tuple[Tensor, ...]:
        mix, norm, coefficients = self.parts()
        u = norm.reference(mix.reference(stream, pre), weight)
        quantized = () if self.format == "none" else (formats.round_trip(u, self.format),)
        return u, *quantized, *coefficients.reference(stream, fn, scale, base)

    def flops(
        self,
        stream: TensorType,
        pre: TensorType,
        fn: TensorType,
        scale: TensorType,
        base: TensorType,
        weight: TensorType,
    ) -> int:
        mix, norm, coefficients = self.parts()
        x = mix.infer(stream, pre)
        total = mix.flops(stream, pre) + norm.flops(x, weight) + coefficients.flops(stream, fn, scale, base)
        return total + (0 if self.format == "none" else 3 * x.elements)

    @classmethod
    def examples(cls) -> Iterator[Example]:
        normal = seeded(28)
        for tokens, copies, width, dtype, format in (
            (3, 4, 64, "bf16", "fp8_e8m0_32"),
            (1, 2, 33, "f32", "none"),
        ):
            outputs = (2 + copies) * copies
            yield Example(
                cls(1e-20, 1e-6, 20, format),
                (
                    normal(tokens, copies, width, dtype=dtype),
                    normal(tokens, copies).sigmoid(),
                    normal(outputs, copies * width, scale=(copies * width) ** -0.5),
                    normal(3).abs() + 0.5,
                    normal(outputs),
                    normal(width, dtype=dtype),
                ),
            )
