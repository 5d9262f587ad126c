"""Low-rank output projection of head groups (DeepSeek-V4.1 report, section 2.3)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from v41c.ir import formats
from v41c.ir.op import FLOATS, Example, Op, product, seeded
from v41c.ir.types import DType, TensorType

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class GroupedLinear(Op):
    """out[t, g·M + m] = Σ_k x[t, g, k] · weight[g·M + m, k] · scale[(g·M + m) // 32, k // 32]

    f32 accumulation in ascending k, rounded to the dtype of x. An fp8 weight is used at its exact value and the input
    is not quantised.
    """

    def infer(self, x: TensorType, weight: TensorType, scale: TensorType | None = None) -> TensorType:
        self.require_dtype("x", x, *FLOATS)
        self.require_rank("x", x, 3)
        self.require_dtype("weight", weight, *FLOATS, DType.F8E4M3)
        self.require_rank("weight", weight, 2)
        rows, columns = (int(dim) for dim in weight.shape)
        self.require(columns == x.shape[2], "weight columns", x.shape[2], columns)
        self.require(rows % int(x.shape[1]) == 0, "weight rows", f"a multiple of {x.shape[1]} groups", rows)
        self.require(
            (scale is not None) == (weight.dtype == DType.F8E4M3), "scale", "one iff the weight is f8e4m3", scale
        )
        if scale is not None:
            self.require_dtype("scale", scale, DType.E8M0)
            self.require_shape("scale", scale, -(-rows // 32), -(-columns // 32))
        return TensorType(x.dtype, (x.shape[0], rows))

    def reference(self, x: Tensor, weight: Tensor, scale: Tensor | None = None) -> Tensor:
        import torch

        groups = formats.dequantize(weight, scale).unflatten(0, (x.shape[1], -1))
        return torch.einsum("tgk,gmk->tgm", x.float(), groups).flatten(1).to(x.dtype)

    def flops(self, x: TensorType, weight: TensorType, scale: TensorType | None = None) -> int:
        return 2 * product(x.shape[0], *weight.shape)

    @classmethod
    def examples(cls) -> Iterator[Example]:
        import torch

        normal = seeded(8)
        for tokens, groups, rows, columns in ((1, 2, 64, 64), (3, 4, 32, 96)):
            weight = (normal(groups * rows, columns) * 60).to(torch.float8_e4m3fn)
            codes = torch.arange(groups * rows // 32 * columns // 32).view(groups * rows // 32, -1) % 5 + 118
            scale = codes.to(torch.uint8).view(torch.float8_e8m0fnu)
            yield Example(cls(), (normal(tokens, groups, columns, dtype="bf16"), weight, scale))
        yield Example(cls(), (normal(2, 2, 48, dtype="bf16"), normal(40, 48, dtype="bf16"), None))
        yield Example(cls(), (normal(5, 2, 24), normal(36, 24), None))
