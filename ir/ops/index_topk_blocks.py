"""Selection and candidate pool of the same indexer (DeepSeek-V4.1 report, section 2.3.2)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from v41c.ir.fused import FusedOp, Run
from v41c.ir.op import Example
from v41c.ir.ops.candidate_blocks import CandidateBlocks
from v41c.ir.ops.index_topk import IndexTopk, index_examples
from v41c.ir.types import TensorType


@dataclass(frozen=True)
class IndexTopkBlocks(FusedOp):
    """selection = index_topk(q, weights, keys, …);  pool = candidate_blocks(q, weights, keys, …)

    The composition of both, whose scores are the same and are made once.
    """

    ratio: int
    topk: int
    blocks: int
    block: int
    scale: float

    def infer(
        self, q: TensorType, weights: TensorType, keys: TensorType, positions: TensorType, slots: TensorType
    ) -> tuple[TensorType, TensorType]:
        selection, pool = self.inferred(q, weights, keys, positions, slots)
        return selection, pool

    @property
    def rows(self) -> IndexTopk:
        """What makes the selection."""
        return IndexTopk(self.ratio, self.topk, self.scale, self.block)

    @property
    def pool(self) -> CandidateBlocks:
        """What makes the pool."""
        return CandidateBlocks(self.ratio, self.blocks, self.block, self.scale)

    def compose(self, run: Run, *operands: Any) -> tuple[Any, ...]:
        (selection,) = run(self.rows, *operands, None)
        (pool,) = run(self.pool, *operands)
        return selection, pool

    def flops(self, *operands: TensorType | None) -> int:
        return self.rows.flops(*operands)  # type: ignore[arg-type]  # all are there

    def touched(self, *operands: TensorType | None) -> Mapping[str, int]:
        return self.rows.touched(*operands)  # type: ignore[arg-type]  # all are there

    @classmethod
    def examples(cls) -> Iterator[Example]:
        for q, weights, keys, positions, slots, ratio in index_examples():
            for blocks, block in ((3, 4), (2, 5)):
                yield Example(cls(ratio, 5, blocks, block, 0.125), (q, weights, keys, positions, slots))
