"""The first projections of attention and the norms behind them (DeepSeek-V4.1 report, section 2.3)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from v41c.ir import packed
from v41c.ir.fused import FusedOp, Run
from v41c.ir.op import Example, Op, seeded
from v41c.ir.ops.latent_norms import LatentNorms
from v41c.ir.ops.linear import Linear
from v41c.ir.ops.linear_group import LinearGroup
from v41c.ir.types import TensorType


@dataclass(frozen=True)
class Latents(FusedOp):
    """q' = round_trip(norm(x · q_downᵀ));  kv' = round_trip(rope(norm(x · kv_downᵀ)))

    The composition of `linear_group` and `latent_norms`, with their roundings; a format "none" is no round trip.
    `packed` gives q' as packed rows, for products alone.
    """

    out: str
    eps: float
    q_format: str
    kv_format: str
    packed: bool = False
    packable: ClassVar[tuple[str, ...]] = LinearGroup.packable

    def infer(
        self,
        x: TensorType,
        q_down: TensorType,
        kv_down: TensorType,
        q_weight: TensorType,
        kv_weight: TensorType,
        cos: TensorType,
        sin: TensorType,
        q_scale: TensorType | None = None,
        kv_scale: TensorType | None = None,
    ) -> tuple[TensorType, TensorType]:
        query, keys = self.inferred(x, q_down, kv_down, q_weight, kv_weight, cos, sin, q_scale, kv_scale)
        return query, keys

    @property
    def norms(self) -> LatentNorms:
        """The second of the two operations that this one is composed of."""
        return LatentNorms(self.eps, self.q_format, self.kv_format, self.packed)

    def packing(self) -> tuple[Op, int] | None:
        return packed.replaced(self, self.q_format, 0)

    def compose(self, run: Run, *operands: Any) -> tuple[Any, ...]:
        x, q_down, kv_down, q_weight, kv_weight, cos, sin, q_scale, kv_scale = operands
        q, kv = run(LinearGroup(self.out), x, q_down, kv_down, None, None, q_scale, kv_scale, None, None)
        return run(self.norms, q, q_weight, kv, kv_weight, cos, sin)

    @classmethod
    def examples(cls) -> Iterator[Example]:
        normal = seeded(33)
        products = [e for e in Linear.examples() if e.op == Linear("bf16")]
        for (x, weight, scale), formats, pairs in (
            (products[0].operands, ("fp8_e8m0_32", "fp8_e8m0_32"), 8),
            (products[1].operands, ("none", "none"), 16),
            (products[-1].operands, ("fp8_e8m0_32", "fp8_e8m0_32"), 8),
            (products[-1].operands, ("fp8_e8m0_32", "fp8_e8m0_32", True), 8),
        ):
            if x is None or weight is None:
                continue
            angle, rows = normal(x.shape[0], pairs) * 3, weight.shape[0]
            norms = (normal(rows, dtype="bf16"), normal(rows, dtype="bf16"))
            tables = (angle.cos(), angle.sin())
            yield Example(cls("bf16", 1e-6, *formats), (x, weight, weight, *norms, *tables, scale, scale))
        x, weights = normal(5, 24), (normal(33, 24), normal(22, 24))
        angle = normal(5, 5) * 3
        norms = (normal(33), normal(22))
        yield Example(cls("f32", 1e-6, "none", "none"), (x, *weights, *norms, angle.cos(), angle.sin(), None, None))
