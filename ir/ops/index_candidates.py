"""Selection among the rows of candidate blocks only (DeepSeek-V4.1 report, section 2.3.2)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from v41c.ir.fused import FusedOp, Run
from v41c.ir.op import Example
from v41c.ir.ops.index_topk import IndexTopk
from v41c.ir.types import TensorType


@dataclass(frozen=True)
class IndexCandidates(FusedOp):
    """out[t] = the `topk` best visible rows j with j // block in pool[t], ascending: `index_topk` with that pool

    Scores in f32 as there, of at most pool width · `block` rows a token whatever the context.
    """

    ratio: int
    topk: int
    scale: float
    block: int

    def infer(
        self,
        q: TensorType,
        weights: TensorType,
        keys: TensorType,
        positions: TensorType,
        slots: TensorType,
        pool: TensorType,
    ) -> TensorType:
        return self.inferred(q, weights, keys, positions, slots, pool)[0]

    def compose(self, run: Run, *operands: Any) -> tuple[Any, ...]:
        return run(IndexTopk(self.ratio, self.topk, self.scale, self.block), *operands)

    def flops(self, *operands: TensorType | None) -> int:
        q, _, keys, _, _, pool = operands
        return 0 if q is None else 2 * q.elements * self._rows(keys, pool)

    def touched(self, *operands: TensorType | None) -> Mapping[str, int]:
        _, _, keys, _, _, pool = operands
        if keys is None or pool is None:
            return {}
        rows = min(int(pool.shape[0]) * self._rows(keys, pool), int(keys.shape[1]))
        return {"keys": TensorType(keys.dtype, (rows, keys.shape[2])).size_bytes}

    def _rows(self, keys: TensorType | None, pool: TensorType | None) -> int:
        """Rows that a token's candidate blocks have."""
        if keys is None or pool is None:
            return 0
        return min(int(keys.shape[1]), int(pool.shape[1]) * self.block)

    @classmethod
    def examples(cls) -> Iterator[Example]:
        for example in IndexTopk.examples():
            if example.operands[5] is not None:
                yield Example(cls(**example.op.attributes()), example.operands)
