"""Another shape for the axes after the first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from v41c.ir.op import Example, Op, product, seeded
from v41c.ir.types import TensorType

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Reshape(Op):
    """out[t, …] = x[t, …] with the trailing axes as `shape`

    No arithmetic: a view of the same bytes.
    """

    shape: tuple[int, ...]
    view: ClassVar[bool] = True

    def infer(self, x: TensorType) -> TensorType:
        self.require(
            product(*x.shape[1:]) == product(*self.shape), "elements", product(*x.shape[1:]), product(*self.shape)
        )
        return TensorType(x.dtype, (x.shape[0], *self.shape))

    def reference(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], *self.shape).clone()

    def flops(self, x: TensorType) -> int:
        return 0

    @classmethod
    def examples(cls) -> Iterator[Example]:
        normal = seeded(10)
        yield Example(cls((4, 10)), (normal(3, 40, dtype="bf16"),))
        yield Example(cls((24,)), (normal(2, 3, 8),))
