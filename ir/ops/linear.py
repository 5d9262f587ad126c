"""Matrix product with a stored weight: bf16, f32, or fp8 with 32x32 power-of-two scales."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from v41c.ir import formats, packed
from v41c.ir.op import FLOATS, Example, Op, product, seeded
from v41c.ir.types import DType, TensorType

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Linear(Op):
    """out[t, m] = Σ_k x[t, k] · weight[m, k] · scale[m // 32, k // 32]

    f32 accumulation in ascending k, rounded to `out`. The input is used as it is: its quantisation is a `round_trip`,
    or `pack_rows`, whose rows stand for the same values.
    """

    out: str
    packable: ClassVar[tuple[str, ...]] = ("x",)

    def infer(self, x: TensorType, weight: TensorType, scale: TensorType | None = None) -> TensorType:
        x = packed.values_type(self, "x", x)
        self.require_dtype("x", x, *FLOATS)
        self.require_rank("x", x, 2)
        self.require_dtype("weight", weight, *FLOATS, DType.F8E4M3)
        self.require_rank("weight", weight, 2)
        self.require_shape("weight", weight, weight.shape[0], x.shape[1])
        rows, columns = (int(dim) for dim in weight.shape)
        self.require(
            (scale is not None) == (weight.dtype == DType.F8E4M3), "scale", "one iff the weight is f8e4m3", scale
        )
        if scale is not None:
            self.require_dtype("scale", scale, DType.E8M0)
            self.require_shape("scale", scale, -(-rows // 32), -(-columns // 32))
        return TensorType(DType(self.out), (x.shape[0], weight.shape[0]))

    def reference(self, x: Tensor, weight: Tensor, scale: Tensor | None = None) -> Tensor:
        import torch

        y = torch.nn.functional.linear(packed.values(x).float(), formats.dequantize(weight, scale))
        return y if self.out == "f32" else y.bfloat16()

    def flops(self, x: TensorType, weight: TensorType, scale: TensorType | None = None) -> int:
        return 2 * product(x.shape[0], *weight.shape)

    @classmethod
    def examples(cls) -> Iterator[Example]:
        import torch

        normal = seeded(7)
        for tokens, rows, columns in ((1, 64, 64), (3, 80, 96), (17, 33, 32)):
            weight = (normal(rows, columns) * 60).to(torch.float8_e4m3fn)
            codes = torch.arange(-(-rows // 32) * -(-columns // 32)).view(-(-rows // 32), -1) % 5 + 118
            x = formats.round_trip(normal(tokens, columns, dtype="bf16"), "fp8_e8m0_32")
            yield Example(cls("bf16"), (x, weight, codes.to(torch.uint8).view(torch.float8_e8m0fnu)))
        yield Example(cls("f32"), (normal(4, 50, dtype="bf16"), normal(19, 50, dtype="bf16"), None))
        yield Example(cls("bf16"), (normal(2, 64, dtype="bf16"), normal(48, 64, dtype="bf16"), None))
        yield Example(cls("f32"), (normal(5, 24), normal(70, 24), None))
        x = formats.pack(normal(3, 96, dtype="bf16"), packed.FORMAT)
        weight = (normal(64, 96) * 60).to(torch.float8_e4m3fn)
        codes = torch.arange(6).view(2, 3) % 5 + 118
        yield Example(cls("bf16"), (x, weight, codes.to(torch.uint8).view(torch.float8_e8m0fnu)))
        yield Example(cls("f32"), (x, normal(33, 96, dtype="bf16"), None))
