"""A sublayer boundary in one pass over the residual stream (DeepSeek-V4.1 report, section 2.4.1: Single-Pass mHC)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from v41c.ir import formats
from v41c.ir.op import Example, Op, seeded
from v41c.ir.ops.hc_coefficients import HcCoefficients
from v41c.ir.ops.hc_mix import HcMix
from v41c.ir.ops.hc_update import HcUpdate
from v41c.ir.ops.rms_norm import RmsNorm
from v41c.ir.types import TensorType

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class MhcBoundary(Op):
    """X' = update(X, y, post, comb);  u = norm(mix(X', pre));  pre', post', comb' = coefficients(X')

    The composition of `hc_update`, `hc_mix`, `rms_norm` and `hc_coefficients`, with their roundings. `format` adds the
    round trip of u as another result ("none": no such result). X and y are read once, X' and u written once: (2N+2)·D
    values a token against the (4N+4)·D of the parts.
    """

    norm_eps: float
    eps: float
    iterations: int
    format: str
    traced: ClassVar[bool] = False

    def infer(
        self,
        stream: TensorType,
        y: TensorType,
        post: TensorType,
        comb: TensorType,
        pre: TensorType,
        fn: TensorType,
        scale: TensorType,
        base: TensorType,
        weight: TensorType,
    ) -> tuple[TensorType, ...]:
        update, mix, norm, coefficients = self.parts()
        updated = update.infer(stream, y, post, comb)
        u = norm.infer(mix.infer(updated, pre), weight)
        quantized = () if self.format == "none" else (u,)
        return updated, u, *quantized, *coefficients.infer(updated, fn, scale, base)

    def parts(self) -> tuple[HcUpdate, HcMix, RmsNorm, HcCoefficients]:
        """The operations this one is composed of."""
        coefficients = HcCoefficients(self.norm_eps, self.eps, self.iterations)
        return HcUpdate(), HcMix(), RmsNorm(self.norm_eps), coefficients

    def reference(
        self,
        stream: Tensor,
        y: Tensor,
        post: Tensor,
        comb: Tensor,
        pre: Tensor,
        fn: Tensor,
        scale: Tensor,
        base: Tensor,
        weight: Tensor,
    ) -> tuple[Tensor, ...]:
        update, mix, norm, coefficients = self.parts()
        updated = update.reference(stream, y, post, comb)
        u = norm.reference(mix.reference(updated, pre), weight)
        quantized = () if self.format == "none" else (formats.round_trip(u, self.format),)
        return updated, u, *quantized, *coefficients.reference(updated, fn, scale, base)

    def flops(
        self,
        stream: TensorType,
        y: TensorType,
        post: TensorType,
        comb: TensorType,
        pre: TensorType,
        fn: TensorType,
        scale: TensorType,
        base: TensorType,
        weight: TensorType,
    ) -> int:
        update, mix, norm, coefficients = self.parts()
        x = mix.infer(stream, pre)
        total = update.flops(stream, y, post, comb) + mix.flops(stream, pre) + norm.flops(x, weight)
        return total + coefficients.flops(stream, fn, scale, base) + (0 if self.format == "none" else 3 * x.elements)

    @classmethod
    def examples(cls) -> Iterator[Example]:
        normal = seeded(27)
        for tokens, copies, width, dtype, format in (
            (3, 4, 64, "bf16", "fp8_e8m0_32"),
            (1, 4, 96, "bf16", "none"),
            (5, 2, 33, "f32", "none"),
        ):
            outputs = (2 + copies) * copies
            yield Example(
                cls(1e-20, 1e-6, 20, format),
                (
                    normal(tokens, copies, width, dtype=dtype),
                    normal(tokens, width, dtype=dtype),
                    normal(tokens, copies).sigmoid(),
                    normal(tokens, copies, copies).softmax(-1),
                    normal(tokens, copies).sigmoid(),
                    normal(outputs, copies * width, scale=(copies * width) ** -0.5),
                    normal(3).abs() + 0.5,
                    normal(outputs),
                    normal(width, dtype=dtype),
                ),
            )
