"""Selection of compressed rows by the indexer (DeepSeek-V4.1 report, section 2.3.2)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from v41c.ir import formats
from v41c.ir.op import FLOATS, Example, Op, seeded
from v41c.ir.types import DType, TensorType, i32

if TYPE_CHECKING:
    from torch import Tensor


TILE = 128  # tokens per step of the reference: bounds its memory


@dataclass(frozen=True)
class IndexTopk(Op):
    """score(t, j) = Σ_h relu(q[t, h] · key[j]) · weights[t, h] · scale;  out[t] = the `topk` best visible j, ascending

    f32. Row j is visible iff j < (positions[t] + 1) // ratio, and, with `pool`, iff its block j // `block` is one of
    the token's candidate blocks. Ties go to the lower position; −1 fills the end of the row.
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
        pool: TensorType | None = None,
    ) -> TensorType:
        check_index_operands(self, q, weights, keys, positions, slots)
        if pool is not None:
            self.require_dtype("pool", pool, DType.I32)
            self.require_shape("pool", pool, q.shape[0], pool.shape[-1])
        return i32(q.shape[0], self.topk)

    def reference(
        self,
        q: Tensor,
        weights: Tensor,
        keys: Tensor,
        positions: Tensor,
        slots: Tensor,
        pool: Tensor | None = None,
    ) -> Tensor:
        import torch

        out = torch.full((q.shape[0], self.topk), -1, dtype=torch.int32)
        for rows, scores in index_scores(q, weights * self.scale, keys, positions, slots, self.ratio):
            if pool is not None:
                blocks = torch.arange(scores.shape[1]) // self.block
                allowed = (blocks.view(1, -1, 1) == pool[rows].unsqueeze(1)).any(-1)
                scores = scores.masked_fill(~allowed, -torch.inf)
            out[rows] = best_ascending(scores, self.topk)
        return out

    def flops(
        self,
        q: TensorType,
        weights: TensorType,
        keys: TensorType,
        positions: TensorType,
        slots: TensorType,
        pool: TensorType | None = None,
    ) -> int:
        return 2 * q.elements * int(keys.shape[1])

    def touched(
        self,
        q: TensorType,
        weights: TensorType,
        keys: TensorType,
        positions: TensorType,
        slots: TensorType,
        pool: TensorType | None = None,
    ) -> Mapping[str, int]:
        return {"keys": TensorType(keys.dtype, keys.shape[1:]).size_bytes}

    @classmethod
    def examples(cls) -> Iterator[Example]:
        import torch

        for q, weights, keys, positions, slots, ratio in index_examples():
            yield Example(cls(ratio, 5, 0.125, 4), (q, weights, keys, positions, slots, None))
            pool = torch.tensor([[0, 1]], dtype=torch.int32).repeat(len(positions), 1)
            pool[-1, 0] = -1
            yield Example(cls(ratio, 5, 0.125, 4), (q, weights, keys, positions, slots, pool))


def check_index_operands(
    op: Op, q: TensorType, weights: TensorType, keys: TensorType, positions: TensorType, slots: TensorType
) -> None:
    """Shape rules that both users of index scores share."""
    op.require_dtype("q", q, *FLOATS)
    op.require_rank("q", q, 3)
    op.require_dtype("weights", weights, *FLOATS)
    op.require_shape("weights", weights, *q.shape[:2])
    op.require_rank("keys", keys, 3)
    op.require_dtype("keys", keys, DType.U8, DType.F32)
    width = int(q.shape[2])
    row = formats.FORMATS["fp4_e8m0_32"].row_bytes(width) if keys.dtype == DType.U8 else width
    op.require_shape("keys", keys, *keys.shape[:2], row)
    op.require_shape("positions", positions, q.shape[0])
    op.require_shape("slots", slots, q.shape[0])


def index_scores(
    q: Tensor, weights: Tensor, keys: Tensor, positions: Tensor, slots: Tensor, ratio: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Row numbers [t] and scores f32 [t, visible] (−inf where invisible), tile by tile of one sequence."""
    import torch

    visible = (positions + 1) // ratio
    for slot in slots.unique():
        for rows in torch.nonzero(slots == slot).flatten().split(TILE):
            count = int(visible[rows].max())
            key = formats.read_rows(keys[int(slot), :count], "fp4_e8m0_32", q.shape[2])
            products = (q[rows].float().flatten(0, 1) @ key.T).unflatten(0, (len(rows), -1)).relu()
            scores = (products * weights[rows].float().unsqueeze(-1)).sum(1)
            hidden = torch.arange(count) >= visible[rows].unsqueeze(1)
            yield rows, scores.masked_fill(hidden, -torch.inf)


def best_ascending(scores: Tensor, count: int) -> Tensor:
    """Indices i32 [t, count] of the best finite scores, ties to the lower index, ascending, −1 at the end."""
    import torch

    values, order = torch.sort(scores, dim=1, descending=True, stable=True)
    kept = torch.where(values[:, :count] > -torch.inf, order[:, :count], scores.shape[1]).sort(1).values
    out = torch.full((scores.shape[0], count), -1, dtype=torch.int32)
    out[:, : kept.shape[1]] = torch.where(kept < scores.shape[1], kept, -1).int()
    return out


def index_examples() -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, Tensor, int]]:
    """q, weights, keys, positions, slots, ratio: few and many visible rows, two sequences, exact ties at zero."""
    import torch

    normal = seeded(18)
    for ratio, positions, slots, dtype in (
        (1, (0, 1, 17), (0, 0, 0), "u8"),
        (2, (0, 1, 2, 33, 34), (1, 1, 1, 0, 0), "u8"),
        (1, (40,), (1,), "u8"),
        (4, (7, 66), (0, 1), "f32"),
    ):
        tokens = len(positions)
        rows = normal(2, 48, 32, scale=0.5)
        rows[:, 3:6] = -rows[:, :1].abs()  # equal rows
        q = normal(tokens, 16, 32, dtype="bf16")
        q[0] = q[0].abs()  # against non-positive keys every head is rectified to zero
        q, weights = formats.round_trip(q, "fp4_e8m0_32"), normal(tokens, 16, dtype="bf16")
        yield (
            q if dtype == "u8" else q.float(),
            weights if dtype == "u8" else weights.float(),
            formats.pack(rows, "fp4_e8m0_32") if dtype == "u8" else rows,
            torch.tensor(positions, dtype=torch.int32),
            torch.tensor(slots, dtype=torch.int32),
            ratio,
        )
