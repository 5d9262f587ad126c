"""Attention with the rotations around it and the write of its window keys (DeepSeek-V4.1 report, section 2.3)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from v41c.ir.fused import FusedOp, Run
from v41c.ir.op import Example, seeded
from v41c.ir.ops.attention import Attention
from v41c.ir.ops.rope import Rope
from v41c.ir.ops.window_write import WindowWrite
from v41c.ir.types import TensorType


@dataclass(frozen=True)
class Attend(FusedOp):
    """out = rope⁻¹(attention(rope(q), kv, …, window));  then window = window_write(window, kv)

    Causal; the composition of `rope`, `attention` and `window_write`, with their roundings. The ring is written after
    every token has read it.
    """

    scale: float
    states: ClassVar[tuple[str, ...]] = ("window",)

    def infer(
        self,
        q: TensorType,
        kv: TensorType,
        sink: TensorType,
        window: TensorType,
        positions: TensorType,
        slots: TensorType,
        starts: TensorType,
        first: TensorType,
        cos: TensorType,
        sin: TensorType,
        compressed: TensorType | None = None,
        selection: TensorType | None = None,
    ) -> tuple[TensorType, TensorType]:
        ring, out = self.inferred(q, kv, sink, window, positions, slots, starts, first, cos, sin, compressed, selection)
        return ring, out

    def compose(self, run: Run, *operands: Any) -> tuple[Any, ...]:
        q, kv, sink, window, positions, slots, starts, first, *tables, compressed, selection = operands
        (rotated,) = run(Rope(False), q, *tables)
        sources = (kv, sink, window, positions, slots, starts, first, compressed, selection)
        (attended,) = run(Attention(self.scale, True), rotated, *sources)
        (ring,) = run(WindowWrite(), window, kv, positions, slots)
        return ring, *run(Rope(True), attended, *tables)

    @classmethod
    def examples(cls) -> Iterator[Example]:
        normal = seeded(29)
        for example in Attention.examples():
            if example.op.attributes()["causal"]:
                angle = normal(len(example.operands[4]), 8) * 3  # type: ignore[arg-type]  # positions are there
                tables = (angle.cos(), angle.sin())
                yield Example(cls(64**-0.5), (*example.operands[:8], *tables, *example.operands[8:]))
