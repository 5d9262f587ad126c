"""A sublayer boundary in one pass over the residual stream (DeepSeek-V4.1 report, section 2.4.1: Single-Pass mHC)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from v41c.ir import packed
from v41c.ir.fused import FusedOp, Run
from v41c.ir.op import Example, Op, seeded
from v41c.ir.ops.hc_update import HcUpdate
from v41c.ir.ops.mhc_enter import MhcEnter
from v41c.ir.types import TensorType


@dataclass(frozen=True)
class MhcBoundary(FusedOp):
    """X' = update(X, y, post, comb);  u = norm(mix(X', pre));  pre', post', comb' = coefficients(X')

    The composition of `hc_update`, `hc_mix`, `rms_norm` and `hc_coefficients`, with their roundings. `format` adds the
    round trip of u as another result ("none": no such result), `packed` its packed rows instead, for products alone.
    X and y are read once, X' and u written once: (2N+2)·D values a token against the (4N+4)·D of the parts.
    """

    norm_eps: float
    eps: float
    iterations: int
    format: str
    packed: bool = False

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
        return self.inferred(stream, y, post, comb, pre, fn, scale, base, weight)

    @property
    def entry(self) -> MhcEnter:
        """What happens to the new stream."""
        return MhcEnter(self.norm_eps, self.eps, self.iterations, self.format, self.packed)

    def packing(self) -> tuple[Op, int] | None:
        return packed.replaced(self, self.format, 2)

    def compose(self, run: Run, *operands: Any) -> tuple[Any, ...]:
        stream, y, post, comb, *rest = operands
        (updated,) = run(HcUpdate(), stream, y, post, comb)
        return updated, *self.entry.compose(run, updated, *rest)

    @classmethod
    def examples(cls) -> Iterator[Example]:
        normal = seeded(27)
        for tokens, copies, width, dtype, format, rows_packed in (
            (3, 4, 64, "bf16", "fp8_e8m0_32", False),
            (1, 4, 96, "bf16", "none", False),
            (5, 2, 33, "f32", "none", False),
            (3, 4, 96, "bf16", "fp8_e8m0_32", True),
        ):
            outputs = (2 + copies) * copies
            yield Example(
                cls(1e-20, 1e-6, 20, format, rows_packed),
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
