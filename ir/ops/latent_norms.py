"""The norms behind the first projections of attention (DeepSeek-V4.1 report, section 2.3)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from v41c.ir import packed
from v41c.ir.fused import FusedOp, Run
from v41c.ir.op import Example, Op, seeded
from v41c.ir.ops.pack_rows import rounding
from v41c.ir.ops.rms_norm import RmsNorm
from v41c.ir.ops.rope import Rope
from v41c.ir.ops.round_trip import RoundTrip
from v41c.ir.types import TensorType


@dataclass(frozen=True)
class LatentNorms(FusedOp):
    """q' = round_trip(norm(q));  kv' = round_trip(rope(norm(kv)))

    The composition of `rms_norm`, `rope` and `round_trip`, with their roundings; a format "none" is no round trip.
    `packed` gives q' as packed rows, for products alone.
    """

    eps: float
    q_format: str
    kv_format: str
    packed: bool = False

    def infer(
        self,
        q: TensorType,
        q_weight: TensorType,
        kv: TensorType,
        kv_weight: TensorType,
        cos: TensorType,
        sin: TensorType,
    ) -> tuple[TensorType, TensorType]:
        query, keys = self.inferred(q, q_weight, kv, kv_weight, cos, sin)
        return query, keys

    def packing(self) -> tuple[Op, int] | None:
        return packed.replaced(self, self.q_format, 0)

    def compose(self, run: Run, *operands: Any) -> tuple[Any, ...]:
        q, q_weight, kv, kv_weight, cos, sin = operands
        (query,) = run(RmsNorm(self.eps), q, q_weight)
        (normed,) = run(RmsNorm(self.eps), kv, kv_weight)
        (keys,) = run(Rope(False), normed, cos, sin)
        if self.q_format != "none" or self.packed:
            (query,) = run(rounding(self.q_format, self.packed), query)
        if self.kv_format != "none":
            (keys,) = run(RoundTrip(self.kv_format), keys)
        return query, keys

    @classmethod
    def examples(cls) -> Iterator[Example]:
        normal = seeded(28)
        for tokens, q, kv, pairs, dtype, rounded in (
            (3, 96, 64, 8, "bf16", ("fp8_e8m0_32", "fp8_e8m0_32")),
            (1, 64, 32, 4, "bf16", ("none", "fp8_e8m0_32")),
            (5, 33, 24, 5, "f32", ("none", "none")),
            (3, 96, 64, 8, "bf16", ("fp8_e8m0_32", "fp8_e8m0_32", True)),
        ):
            angle = normal(tokens, pairs) * 3
            x = (normal(tokens, q, dtype=dtype), normal(q, dtype=dtype), normal(tokens, kv, dtype=dtype))
            yield Example(cls(1e-6, *rounded), (*x, normal(kv, dtype=dtype), angle.cos(), angle.sin()))
