"""Low-rank output projection of head groups, quantised for the projection that follows (report, section 2.3)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from v41c.ir import packed
from v41c.ir.fused import FusedOp, Run
from v41c.ir.op import Example, Op
from v41c.ir.ops.grouped_linear import GroupedLinear
from v41c.ir.ops.pack_rows import rounding
from v41c.ir.types import TensorType


@dataclass(frozen=True)
class GroupedLinearQuantized(FusedOp):
    """out = round_trip(grouped_linear(x, weight, scale))

    f32 accumulation in ascending k, rounded to the dtype of x, then to `format`; `packed` gives packed rows, for
    products alone.
    """

    format: str
    packed: bool = False

    def infer(self, x: TensorType, weight: TensorType, scale: TensorType | None = None) -> TensorType:
        return self.inferred(x, weight, scale)[0]

    def packing(self) -> tuple[Op, int] | None:
        return packed.replaced(self, self.format, 0)

    def compose(self, run: Run, *operands: Any) -> tuple[Any, ...]:
        (z,) = run(GroupedLinear(), *operands)
        return run(rounding(self.format, self.packed), z)

    @classmethod
    def examples(cls) -> Iterator[Example]:
        import torch

        for example in GroupedLinear.examples():
            x, weight, _ = example.operands
            if x is not None and weight is not None and weight.shape[0] // x.shape[1] % 32 == 0:
                yield Example(cls("fp8_e8m0_32"), example.operands)
                if x.dtype == torch.bfloat16:
                    yield Example(cls("fp8_e8m0_32", True), example.operands)
