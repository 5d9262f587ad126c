"""The candidate pool of the decoder's later indexers (DeepSeek-V4.1 report, section 2.3.2)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from v41c.ir.op import Example, Op
from v41c.ir.ops.index_topk import best_ascending, check_index_operands, index_examples, index_scores
from v41c.ir.types import TensorType, i32

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class CandidateBlocks(Op):
    """out[t] = the `blocks` best blocks of `block` rows, ascending; a block's score is its best visible row's score

    Scores as in `index_topk`. The block with the newest visible row always wins and counts; blocks without a visible
    row never do. Ties go to the lower block; −1 fills the end of the row.
    """

    ratio: int
    blocks: int
    block: int
    scale: float

    def infer(
        self, q: TensorType, weights: TensorType, keys: TensorType, positions: TensorType, slots: TensorType
    ) -> TensorType:
        check_index_operands(self, q, weights, keys, positions, slots)
        return i32(q.shape[0], self.blocks)

    def reference(self, q: Tensor, weights: Tensor, keys: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        import torch

        out = torch.full((q.shape[0], self.blocks), -1, dtype=torch.int32)
        for rows, scores in index_scores(q, weights * self.scale, keys, positions, slots, self.ratio):
            padding = -scores.shape[1] % self.block
            padded = torch.nn.functional.pad(scores, (0, padding), value=-torch.inf)
            best = padded.unflatten(1, (-1, self.block)).amax(-1) if padded.shape[1] else padded
            newest = ((positions[rows] + 1) // self.ratio - 1).div(self.block, rounding_mode="floor")
            best = best.masked_fill(torch.arange(best.shape[1]) == newest.unsqueeze(1), torch.inf)
            out[rows] = best_ascending(best, self.blocks)
        return out

    def flops(
        self, q: TensorType, weights: TensorType, keys: TensorType, positions: TensorType, slots: TensorType
    ) -> int:
        return 2 * q.elements * int(keys.shape[1])

    def touched(
        self, q: TensorType, weights: TensorType, keys: TensorType, positions: TensorType, slots: TensorType
    ) -> Mapping[str, int]:
        return {"keys": TensorType(keys.dtype, keys.shape[1:]).size_bytes}

    @classmethod
    def examples(cls) -> Iterator[Example]:
        for q, weights, keys, positions, slots, ratio in index_examples():
            for blocks, block in ((3, 4), (2, 5)):
                yield Example(cls(ratio, blocks, block, 0.125), (q, weights, keys, positions, slots))
