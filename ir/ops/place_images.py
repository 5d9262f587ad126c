"""Embeddings of the positions of an image's span: rows of the vision tower and three learned delimiters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from v41c.ir.op import FLOATS, Example, Op, seeded
from v41c.ir.types import DType, TensorType

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class PlaceImages(Op):
    """out[t] = image_values[image_rows[t]] where image_rows[t] ≥ 0, x[t] where −1; start, newline, end where −2, −3, −4

    No arithmetic; rounded to the dtype of x. Rows of `image_values` that nothing points at are not read.
    """

    def infer(
        self,
        x: TensorType,
        image_rows: TensorType,
        image_values: TensorType,
        start: TensorType,
        newline: TensorType,
        end: TensorType,
    ) -> TensorType:
        self.require_dtype("x", x, *FLOATS)
        self.require_rank("x", x, 2)
        self.require_dtype("image_rows", image_rows, DType.I32)
        self.require_shape("image_rows", image_rows, x.shape[0])
        self.require_dtype("image_values", image_values, x.dtype)
        self.require_rank("image_values", image_values, 2)
        self.require_shape("image_values", image_values, image_values.shape[0], x.shape[1])
        for name, delimiter in (("start", start), ("newline", newline), ("end", end)):
            self.require_dtype(name, delimiter, *FLOATS)
            self.require_shape(name, delimiter, x.shape[1])
        return x

    def reference(
        self, x: Tensor, image_rows: Tensor, image_values: Tensor, start: Tensor, newline: Tensor, end: Tensor
    ) -> Tensor:
        out = x.clone()
        seen = image_rows >= 0
        out[seen] = image_values[image_rows[seen].long()]
        for code, delimiter in ((-2, start), (-3, newline), (-4, end)):
            out[image_rows == code] = delimiter.to(x.dtype)
        return out

    def flops(
        self,
        x: TensorType,
        image_rows: TensorType,
        image_values: TensorType,
        start: TensorType,
        newline: TensorType,
        end: TensorType,
    ) -> int:
        return 0

    @classmethod
    def examples(cls) -> Iterator[Example]:
        import torch

        normal = seeded(45)
        for codes, width, dtype in (((0, -1, -2, 1, -3, 2, -4), 40, "bf16"), ((-1, -4, 1), 33, "f32")):
            tables = [normal(len(codes), width, dtype=dtype) for _ in range(2)]
            delimiters = [normal(width, dtype=dtype) for _ in range(3)]
            rows = torch.tensor(codes, dtype=torch.int32)
            yield Example(cls(), (tables[0], rows, tables[1], *delimiters))
