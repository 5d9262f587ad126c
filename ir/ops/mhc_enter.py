"""The entry of a sublayer in one pass over a stream that no update made (DeepSeek-V4.1 report, section 2.4.1)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from v41c.ir import packed
from v41c.ir.fused import FusedOp, Run
from v41c.ir.op import Example, Op, seeded
from v41c.ir.ops.hc_coefficients import HcCoefficients
from v41c.ir.ops.hc_mix import HcMix
from v41c.ir.ops.pack_rows import rounding
from v41c.ir.ops.rms_norm import RmsNorm
from v41c.ir.types import TensorType


@dataclass(frozen=True)
class MhcEnter(FusedOp):
    """u = norm(mix(X, pre));  pre', post', comb' = coefficients(X)

    The composition of `hc_mix`, `rms_norm` and `hc_coefficients`, with their roundings, for the first sublayer of a
    graph and for one behind an Engram, whose gate needs a whole pass of its own. `format` adds the round trip of u as
    another result ("none": no such result), `packed` its packed rows instead, for products alone.
    """

    norm_eps: float
    eps: float
    iterations: int
    format: str
    packed: bool = False

    def infer(
        self,
        stream: TensorType,
        pre: TensorType,
        fn: TensorType,
        scale: TensorType,
        base: TensorType,
        weight: TensorType,
    ) -> tuple[TensorType, ...]:
        return self.inferred(stream, pre, fn, scale, base, weight)

    @property
    def coefficients(self) -> HcCoefficients:
        """What predicts the next mixes."""
        return HcCoefficients(self.norm_eps, self.eps, self.iterations)

    def packing(self) -> tuple[Op, int] | None:
        return packed.replaced(self, self.format, 1)

    def compose(self, run: Run, *operands: Any) -> tuple[Any, ...]:
        stream, pre, fn, scale, base, weight = operands
        (mixed,) = run(HcMix(), stream, pre)
        (u,) = run(RmsNorm(self.norm_eps), mixed, weight)
        return u, *self._quantized(run, u), *run(self.coefficients, stream, fn, scale, base)

    def _quantized(self, run: Run, u: Any) -> tuple[Any, ...]:
        return () if self.format == "none" and not self.packed else run(rounding(self.format, self.packed), u)

    @classmethod
    def examples(cls) -> Iterator[Example]:
        normal = seeded(28)
        for tokens, copies, width, dtype, format, rows_packed in (
            (3, 4, 64, "bf16", "fp8_e8m0_32", False),
            (1, 2, 33, "f32", "none", False),
            (3, 4, 96, "bf16", "fp8_e8m0_32", True),
        ):
            outputs = (2 + copies) * copies
            yield Example(
                cls(1e-20, 1e-6, 20, format, rows_packed),
                (
                    normal(tokens, copies, width, dtype=dtype),
                    normal(tokens, copies).sigmoid(),
                    normal(outputs, copies * width, scale=(copies * width) ** -0.5),
                    normal(3).abs() + 0.5,
                    normal(outputs),
                    normal(width, dtype=dtype),
                ),
            )
