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
    from `partial` [S, 2, ratio, HD] (0: k, 1: gate), whose slot is position mod ratio; every token of the step is
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
        self.require_shape("partial", partial, partial.shape[0], 2, self.ratio, k.shape[1])
        self.require_shape("gate", gate, *k.shape)
        for name, operand in (("positions", positions), ("slots", slots), ("starts", starts)):
            self.require_shape(name, operand, k.shape[0])
        return partial, TensorType(DType(self.out), k.shape)

    def reference(
        self, partial: Tensor, k: Tensor, gate: Tensor, positions: Tensor, slots: Tensor, starts: Tensor
    ) -> tuple[Tensor, Tensor]:
        import torch

        r = self.ratio
        rows = torch.arange(k.shape[0])
        closing = rows[positions % r == r - 1]
        members = closing.unsqueeze(1) - torch.arange(r - 1, -1, -1)  # [groups, r] rows of the step
        inside = (members >= starts[closing].unsqueeze(1)).unsqueeze(-1)
        safe = members.clamp_min(0)
        state = partial[slots[closing].long()]
        ks = torch.where(inside, k[safe], state[:, 0])
        gates = torch.where(inside, gate[safe], state[:, 1])
        pooled = torch.zeros_like(k)
        pooled[closing] = (gates.softmax(1) * ks).sum(1)
        kept = newest_rows(slots, positions, r)
        for index, source in enumerate((k, gate)):
            partial[slots[kept].long(), index, positions[kept].long() % r] = source[kept]
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
        return {"partial": 2 * min(int(k.shape[0]), self.ratio) * int(k.shape[1]) * 4}

    @classmethod
    def examples(cls) -> Iterator[Example]:
        import torch

        normal = seeded(16)
        for positions, slots, ratio, out in (
            ([4], [0], 2, "bf16"),
            ([5], [1], 2, "bf16"),
            ([3, 4, 5, 6, 7], [1] * 5, 2, "bf16"),
            ([3, 4, 5, 9, 10, 11], [0, 0, 0, 1, 1, 1], 4, "f32"),
        ):
            position, slot = torch.tensor(positions, dtype=torch.int32), torch.tensor(slots, dtype=torch.int32)
            begins = [row for row in range(len(slots)) if row == 0 or slots[row] != slots[row - 1]]
            starts = torch.tensor([max(b for b in begins if b <= row) for row in range(len(slots))], dtype=torch.int32)
            k, gate = normal(len(slots), 48), normal(len(slots), 48)
            yield Example(cls(ratio, out), (normal(2, 2, ratio, 48), k, gate, position, slot, starts))
