"""Several projections of one input."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from v41c.ir.fused import FusedOp, Run
from v41c.ir.op import Example
from v41c.ir.ops.linear import Linear
from v41c.ir.types import TensorType

#: weights that one operation takes at most
MOST = 4


@dataclass(frozen=True)
class LinearGroup(FusedOp):
    """out_i[t, m] = Σ_k x[t, k] · weight_i[m, k] · scale_i[m // 32, k // 32], for two to four weights: `linear` of each

    f32 accumulation in ascending k, rounded to `out`.
    """

    out: str
    packable: ClassVar[tuple[str, ...]] = Linear.packable

    def infer(
        self,
        x: TensorType,
        weight: TensorType,
        weight_2: TensorType,
        weight_3: TensorType | None = None,
        weight_4: TensorType | None = None,
        scale: TensorType | None = None,
        scale_2: TensorType | None = None,
        scale_3: TensorType | None = None,
        scale_4: TensorType | None = None,
    ) -> tuple[TensorType, ...]:
        return self.inferred(x, weight, weight_2, weight_3, weight_4, scale, scale_2, scale_3, scale_4)

    def compose(self, run: Run, *operands: Any) -> tuple[Any, ...]:
        x, rest = operands[0], operands[1:]
        pairs = [pair for pair in zip(rest[:MOST], rest[MOST:], strict=True) if pair[0] is not None]
        return tuple(run(Linear(self.out), x, *pair)[0] for pair in pairs)

    @classmethod
    def examples(cls) -> Iterator[Example]:
        for example in Linear.examples():
            x, weight, scale = example.operands
            if x is not None and weight is not None:
                weights, scales = (weight, weight, None, None), (scale, scale, None, None)
                yield Example(cls(example.op.attributes()["out"]), (x, *weights, *scales))
                yield Example(cls("f32"), (x, weight, weight, weight, None, scale, scale, scale, None))
