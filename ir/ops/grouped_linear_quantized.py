"""Low-rank output projection of head groups, quantised for the projection that follows (report, section 2.3)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from v41c.ir.fused import FusedOp, Run
from v41c.ir.op import Example
from v41c.ir.ops.grouped_linear import GroupedLinear
from v41c.ir.ops.round_trip import RoundTrip
from v41c.ir.types import TensorType


@dataclass(frozen=True)
class GroupedLinearQuantized(FusedOp):
    """out = round_trip(grouped_linear(x, weight, scale))

    f32 accumulation in ascending k, rounded to the dtype of x, then to `format`.
    """

    format: str

    def infer(self, x: TensorType, weight: TensorType, scale: TensorType | None = None) -> TensorType:
        return self.inferred(x, weight, scale)[0]

    def compose(self, run: Run, *operands: Any) -> tuple[Any, ...]:
        (z,) = run(GroupedLinear(), *operands)
        return run(RoundTrip(self.format), z)

    @classmethod
    def examples(cls) -> Iterator[Example]:
        for example in GroupedLinear.examples():
            x, weight, _ = example.operands
            if x is not None and weight is not None and weight.shape[0] // x.shape[1] % 32 == 0:
                yield Example(cls("fp8_e8m0_32"), example.operands)
