"""Patches side by side: pixel unshuffle over lists of patches (arXiv:1609.05158, the inverse of equation 4)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from v41c.ir.op import FLOATS, Example, Op, product, seeded
from v41c.ir.types import DType, TensorType

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class MergePatches(Op):
    """out[r, d·G + g] = x[sources[r, g], d], 0 where sources[r, g] = −1; G sources of each row

    No arithmetic.
    """

    def infer(self, x: TensorType, sources: TensorType) -> TensorType:
        self.require_dtype("x", x, *FLOATS)
        self.require_rank("x", x, 2)
        self.require_dtype("sources", sources, DType.I32)
        self.require_rank("sources", sources, 2)
        return TensorType(x.dtype, (sources.shape[0], product(x.shape[1], sources.shape[1])))

    def reference(self, x: Tensor, sources: Tensor) -> Tensor:
        import torch

        padded = torch.cat((x, torch.zeros_like(x[:1]) if len(x) else x.new_zeros(1, x.shape[1])))
        return padded[sources.long()].transpose(1, 2).flatten(1)

    def flops(self, x: TensorType, sources: TensorType) -> int:
        return 0

    def touched(self, x: TensorType, sources: TensorType) -> Mapping[str, int]:
        return {"x": TensorType(x.dtype, (sources.shape[0], product(x.shape[1], sources.shape[1]))).size_bytes}

    @classmethod
    def examples(cls) -> Iterator[Example]:
        import torch

        normal = seeded(44)

        def ints(*rows: tuple[int, ...]) -> Tensor:
            return torch.tensor(rows, dtype=torch.int32)

        yield Example(cls(), (normal(5, 40, dtype="bf16"), ints((0, 1, 3, 4), (2, -1, -1, -1), (4, 3, 1, 0))))
        yield Example(cls(), (normal(3, 33), ints((2, -1, 1), (-1, -1, 0))))
