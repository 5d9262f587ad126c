"""The router of a mixture of experts: logits and choice (DeepSeek-V3 report, arXiv:2412.19437, section 2.1.2)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from v41c.ir.fused import FusedOp, Run
from v41c.ir.op import Example, seeded
from v41c.ir.ops.linear import Linear
from v41c.ir.ops.route import Route
from v41c.ir.types import TensorType


@dataclass(frozen=True)
class Gate(FusedOp):
    """ids, weights = route(x · weightᵀ, bias, image_bias, image)

    The composition of `linear` with f32 logits and `route`.
    """

    experts: int
    score: str
    scale: float
    temperature: float
    normalize: bool

    def infer(
        self,
        x: TensorType,
        weight: TensorType,
        bias: TensorType,
        image_bias: TensorType | None = None,
        image: TensorType | None = None,
    ) -> tuple[TensorType, TensorType]:
        ids, weights = self.inferred(x, weight, bias, image_bias, image)
        return ids, weights

    def compose(self, run: Run, *operands: Any) -> tuple[Any, ...]:
        x, weight, *biases = operands
        (logits,) = run(Linear("f32"), x, weight, None)
        return run(self.route, logits, *biases)

    @property
    def route(self) -> Route:
        """The choice."""
        return Route(self.experts, self.score, self.scale, self.temperature, self.normalize)

    @classmethod
    def examples(cls) -> Iterator[Example]:
        normal = seeded(30)
        for example in Route.examples():
            logits, *biases = example.operands
            if logits is not None:
                tokens, count = logits.shape
                x, weight = normal(tokens, 48, dtype="bf16"), normal(count, 48, scale=0.2, dtype="bf16")
                yield Example(cls(**example.op.attributes()), (x, weight, *biases))
