"""Pooling of a group of tokens into one compressed latent (DeepSeek-V4.1 report, section 2.3.1)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from v41c.ir.op import Example, Op, seeded
from v41c.ir.ops.window_write import newest_rows
from v41c.ir.types import DType, TensorType

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class CompressPool(Op):
    """pooled[t] = Σ_i softmax_i(gate_i) ⊙ k_i over the group that token t closes; other rows are 0

    f32, rounded to `out`. The softmax runs over the group, per channel. Tokens of the group from earlier steps are read
    from `partial` [S, L, 2, HD] (0: k, 1: gate), a ring by position mod L with L ≥ ratio; every token of the step is
    written there, later ones over earlier ones.
    """

    ratio: int
    out: str
    states: ClassVar[tuple[str, ...]] = ("partial",)

    def infer(
        self,
        partial: TensorType,
        k: TensorType,
        gate: TensorType,
        positions: TensorType,
        slots: TensorType,
        starts: TensorType,
    ) -> tuple[TensorType, TensorType]:
        self.require_rank("partial", partial, 4)
        self.require_rank("k", k, 2)
        for name, operand in (("partial", partial), ("k", k), ("gate", gate)):
            self.require_dtype(name, operand, DType.F32)
        self.require_shape("partial", partial, *partial.shape[:2], 2, k.shape[1])
        length = int(partial.shape[1])
        self.require(length >= self.ratio, "partial shape", f"a ring of at least {self.ratio} rows", length)
        self.require_shape("gate", gate, *k.shape)
        for name, operand in (("positions", positions), ("slots", slots), ("starts", starts)):
            self.require_shape(name, operand, k.shape[0])
        return partial, TensorType(DType(self.out), k.shape)

    def reference(
        self, partial: Tensor, k: Tensor, gate: Tensor, positions: Tensor, slots: Tensor, starts: Tensor
    ) -> tuple[Tensor, Tensor]:
        import torch

        r, length = self.ratio, partial.shape[1]
        rows = torch.arange(k.shape[0])
        closing = rows[positions % r == r - 1]
        back = torch.arange(r - 1, -1, -1)
        members = closing.unsqueeze(1) - back  # [groups, r] rows of the step
        inside = (members >= starts[closing].unsqueeze(1)).unsqueeze(-1)
        safe = members.clamp_min(0)
        places = (positions[closing].long().unsqueeze(1) - back) % length
        state = partial[slots[closing].long().unsqueeze(1), places]  # [groups, r, 2, HD]
        ks = torch.where(inside, k[safe], state[:, :, 0])
        gates = torch.where(inside, gate[safe], state[:, :, 1])
        pooled = torch.zeros_like(k)
        pooled[closing] = (gates.softmax(1) * ks).sum(1)
        kept = newest_rows(slots, positions, length)
        partial[slots[kept].long(), positions[kept].long() % length] = torch.stack((k[kept], gate[kept]), 1)
        return partial, pooled if self.out == "f32" else pooled.bfloat16()

    def flops(
        self,
        partial: TensorType,
        k: TensorType,
        gate: TensorType,
        positions: TensorType,
        slots: TensorType,
        starts: TensorType,
    ) -> int:
        return 5 * k.elements

    def touched(
        self,
        partial: TensorType,
        k: TensorType,
        gate: TensorType,
        positions: TensorType,
        slots: TensorType,
        starts: TensorType,
    ) -> Mapping[str, int]:
        return {"partial": 2 * min(int(k.shape[0]), int(partial.shape[1])) * int(k.shape[1]) * 4}

    @classmethod
    def examples(cls) -> Iterator[Example]:
        import torch

        normal = seeded(16)
        for positions, slots, ratio, length, out in (
            ([4], [0], 2, 2, "bf16"),
            ([5], [1], 2, 2, "bf16"),
            ([3, 4, 5, 6, 7], [1] * 5, 2, 2, "bf16"),
            ([3, 4, 5, 9, 10, 11], [0, 0, 0, 1, 1, 1], 4, 4, "f32"),
            ([7], [1], 2, 5, "f32"),
            ([3, 4, 5, 6, 7, 8, 9, 14, 15], [0, 0, 0, 0, 0, 0, 0, 1, 1], 4, 6, "bf16"),
        ):
            position, slot = torch.tensor(positions, dtype=torch.int32), torch.tensor(slots, dtype=torch.int32)
            begins = [row for row in range(len(slots)) if row == 0 or slots[row] != slots[row - 1]]
            starts = torch.tensor([max(b for b in begins if b <= row) for row in range(len(slots))], dtype=torch.int32)
            k, gate = normal(len(slots), 48), normal(len(slots), 48)
            yield Example(cls(ratio, out), (normal(2, length, 2, 48), k, gate, position, slot, starts))
