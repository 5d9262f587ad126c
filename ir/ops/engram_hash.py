"""Rows of the Engram table for the n-grams that end at a token (DeepSeek-V4.1 report, section 2.2: Engram)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from v41c.ir.op import Example, Op
from v41c.ir.types import DType, TensorType

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class EngramHash(Op):
    """h_1 = t_0·M_0;  h_i = h_{i−1} xor t_{i−1}·M_{i−1};  out[t, (i, head)] = h_i mod prime + offset, i ≥ 2

    Exact int64. t_k is the compressed id k tokens back: from the step, or from `history` [S, L], a ring by position
    mod L with L ≥ N−1. It is `pad` before the sequence's start, at an image token (id −1), and everywhere beyond one.
    """

    multipliers: tuple[int, ...]
    primes: tuple[int, ...]
    offsets: tuple[int, ...]
    pad: int

    def infer(
        self, ids: TensorType, history: TensorType, positions: TensorType, slots: TensorType, starts: TensorType
    ) -> TensorType:
        self.require_dtype("ids", ids, DType.I32)
        self.require_rank("ids", ids, 1)
        self.require_dtype("history", history, DType.I32)
        self.require_rank("history", history, 2)
        length, least = int(history.shape[1]), len(self.multipliers) - 1
        self.require(length >= least, "history shape", f"a ring of at least {least} rows", length)
        self.require(len(self.primes) == len(self.offsets), "offsets", len(self.primes), len(self.offsets))
        self.require(
            len(self.primes) % (len(self.multipliers) - 1) == 0,
            "primes",
            f"a multiple of {len(self.multipliers) - 1}",
            len(self.primes),
        )
        for name, operand in (("positions", positions), ("slots", slots), ("starts", starts)):
            self.require_dtype(name, operand, DType.I32)
            self.require_shape(name, operand, *ids.shape)
        return TensorType(DType.I64, (ids.shape[0], len(self.primes)))

    def reference(self, ids: Tensor, history: Tensor, positions: Tensor, slots: Tensor, starts: Tensor) -> Tensor:
        import torch

        grams = len(self.multipliers)
        primes = torch.tensor(self.primes).view(grams - 1, -1)
        rows = torch.arange(ids.shape[0])
        cut = torch.zeros_like(rows, dtype=torch.bool)
        acc, out = torch.zeros_like(rows), []
        for back in range(grams):
            row, position = rows - back, positions.long() - back
            old = history[slots.long(), position % history.shape[1]]
            token = torch.where(row >= starts, ids[row.clamp_min(0)], old).long()
            cut = cut | (position < 0) | (token < 0)
            acc = acc ^ torch.where(cut, self.pad, token) * self.multipliers[back]
            if back:
                out.append(acc.unsqueeze(1) % primes[back - 1])
        return torch.cat(out, 1) + torch.tensor(self.offsets)

    def flops(
        self, ids: TensorType, history: TensorType, positions: TensorType, slots: TensorType, starts: TensorType
    ) -> int:
        return 0

    def touched(
        self, ids: TensorType, history: TensorType, positions: TensorType, slots: TensorType, starts: TensorType
    ) -> Mapping[str, int]:
        return {"history": ids.size_bytes * (len(self.multipliers) - 1)}

    @classmethod
    def examples(cls) -> Iterator[Example]:
        import torch

        def ints(*values: int) -> Tensor:
            return torch.tensor(values, dtype=torch.int32)

        multipliers = (76632096046245, 4839876093313, 35959672319349, 73987337458391)
        op = cls(multipliers, (41, 43, 47, 53, 59, 61), (0, 41, 84, 131, 184, 243), 2)
        history = ints(5, 9, 11, 3, 99091, 8).view(2, 3)
        longer = ints(5, 9, 11, 3, 99091, 8, 21, 6, 17, 2).view(2, 5)
        yield Example(op, (ints(7), history, ints(4), ints(1), ints(0)))
        yield Example(op, (ints(7), history, ints(1), ints(0), ints(0)))
        yield Example(op, (ints(7, 4, 6), longer, ints(6, 30, 31), ints(0, 1, 1), ints(0, 1, 1)))
        yield Example(
            op,
            (
                ints(7, 99091, -1, 6, 4, 12, 8, 3),
                history,
                ints(0, 1, 2, 3, 4, 5, 30, 31),
                ints(0, 0, 0, 0, 0, 0, 1, 1),
                ints(0, 0, 0, 0, 0, 0, 6, 6),
            ),
        )
