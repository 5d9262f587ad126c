"""Attention over a window and selected compressed rows, with sinks (DeepSeek-V4.1 report, section 2.3)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from v41c.ir import formats
from v41c.ir.op import FLOATS, Example, Op, seeded
from v41c.ir.types import DType, TensorType

if TYPE_CHECKING:
    from torch import Tensor


BLOCK = 64  # entries per step of the running maximum
TILE = 128  # tokens per step of the reference: bounds its memory


@dataclass(frozen=True)
class Attention(Op):
    """out[t, h] = Σ_e softmax_e(scale · q[t, h] · k_e, sink[h]) · k_e over the visible entries e of token t

    f32 accumulation. Entries in order: visible window keys by position, then selected compressed rows. In blocks of 64:
    running maximum, p = exp(score − maximum) rounded to the dtype of q for the value product only, unrounded p summed;
    exp(sink − maximum) joins the sum once at the end. A token without visible entries gives zeros.

    Keys of the step are rows of `kv`, older ones rows of `window` at position mod W. Causal: positions
    max(first, p − W + 1) … p. Not causal (a draft block): positions max(first, s − W) … s − 1, s the position of the
    run's first row, and every row of the run.
    """

    scale: float
    causal: bool

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
        compressed: TensorType | None = None,
        selection: TensorType | None = None,
    ) -> TensorType:
        self.require_dtype("q", q, *FLOATS)
        self.require_rank("q", q, 3)
        tokens, heads, width = q.shape
        self.require_dtype("kv", kv, q.dtype)
        self.require_shape("kv", kv, tokens, width)
        self.require_dtype("sink", sink, DType.F32)
        self.require_shape("sink", sink, heads)
        self.require_rank("window", window, 3)
        row = formats.FORMATS["fp8_e8m0_32"].row_bytes(int(width)) if window.dtype == DType.U8 else width
        self.require_shape("window", window, *window.shape[:2], row)
        for name, operand in (("positions", positions), ("slots", slots), ("starts", starts), ("first", first)):
            self.require_dtype(name, operand, DType.I32)
            self.require_shape(name, operand, tokens)
        self.require((compressed is None) == (selection is None), "selection", "present iff compressed is", selection)
        if compressed is not None and selection is not None:
            self.require_rank("compressed", compressed, 3)
            row = formats.FORMATS["fp4_e4m3_16"].row_bytes(int(width)) if compressed.dtype == DType.U8 else width
            self.require_shape("compressed", compressed, *compressed.shape[:2], row)
            self.require_dtype("selection", selection, DType.I32)
            self.require_shape("selection", selection, tokens, selection.shape[-1])
        return q

    def reference(
        self,
        q: Tensor,
        kv: Tensor,
        sink: Tensor,
        window: Tensor,
        positions: Tensor,
        slots: Tensor,
        starts: Tensor,
        first: Tensor,
        compressed: Tensor | None = None,
        selection: Tensor | None = None,
    ) -> Tensor:
        import torch

        ring = formats.read_rows(window, "fp8_e8m0_32", q.shape[-1]).flatten(0, 1)
        keys, visible = self._window_entries(window.shape[1], positions, slots, starts, first, ring.shape[0])
        source = torch.cat((ring, kv.float()))
        out = torch.empty_like(q)
        for begin in range(0, q.shape[0], TILE):
            tile = slice(begin, begin + TILE)
            entries, seen = source[keys[tile]], visible[tile]
            if compressed is not None and selection is not None:
                chosen = selection[tile].long()
                rows = compressed[slots[tile].long().unsqueeze(1), chosen.clamp_min(0)]
                entries = torch.cat((entries, formats.read_rows(rows, "fp4_e4m3_16", q.shape[-1])), 1)
                seen = torch.cat((seen, chosen >= 0), 1)
            order = (~seen).int().argsort(dim=1, stable=True)
            seen = seen.gather(1, order)
            entries = entries.gather(1, order.unsqueeze(-1).expand_as(entries))
            out[tile] = self._softmax(q[tile], entries.masked_fill(~seen.unsqueeze(-1), 0.0), seen, sink)
        return out

    def _window_entries(
        self, length: int, positions: Tensor, slots: Tensor, starts: Tensor, first: Tensor, rings: int
    ) -> tuple[Tensor, Tensor]:
        """Row of each window entry in cat(rings, kv), and whether the token sees it: [T, W] or [T, W + longest run]."""
        import torch

        position = positions.long().unsqueeze(1)
        start = starts.long().unsqueeze(1)
        begin = position[starts.long()]
        newest = position if self.causal else begin - 1
        lowest = torch.maximum(first.long().unsqueeze(1), newest - length + 1).clamp_min(0)
        key = lowest + torch.arange(length)
        rows = torch.where(key >= begin, rings + start + key - begin, slots.long().unsqueeze(1) * length + key % length)
        visible = key <= newest
        if not self.causal:
            counts = torch.bincount(starts.long(), minlength=positions.shape[0])[starts.long()].unsqueeze(1)
            inside = torch.arange(int(counts.max()) if len(counts) else 0)
            rows = torch.cat((rows, rings + start + inside), 1)
            visible = torch.cat((visible, inside < counts), 1)
        return torch.where(visible, rows, 0), visible

    def _softmax(self, q: Tensor, entries: Tensor, seen: Tensor, sink: Tensor) -> Tensor:
        import torch

        scores = (q.float() @ entries.transpose(1, 2)) * self.scale
        scores = scores.masked_fill(~seen.unsqueeze(1), -torch.inf)
        maximum = torch.full_like(scores[..., :1], -torch.inf)
        total, acc = torch.zeros_like(maximum), torch.zeros_like(q, dtype=torch.float32)
        for begin in range(0, scores.shape[-1], BLOCK):
            block = scores[..., begin : begin + BLOCK]
            new = torch.maximum(maximum, block.amax(-1, keepdim=True))
            shift = new.masked_fill(new == -torch.inf, 0.0)
            decay = (maximum - shift).exp()
            p = (block - shift).exp()
            total = total * decay + p.sum(-1, keepdim=True)
            acc = acc * decay + p.to(q.dtype).float() @ entries[:, begin : begin + BLOCK]
            maximum = new
        empty = maximum == -torch.inf
        total = total + (sink.view(1, -1, 1) - maximum.masked_fill(empty, 0.0)).exp()
        return (acc / total).masked_fill(empty, 0.0).to(q.dtype)

    def flops(
        self,
        q: TensorType,
        kv: TensorType,
        sink: TensorType,
        window: TensorType,
        positions: TensorType,
        slots: TensorType,
        starts: TensorType,
        first: TensorType,
        compressed: TensorType | None = None,
        selection: TensorType | None = None,
    ) -> int:
        entries = int(window.shape[1]) + (int(selection.shape[1]) if selection is not None else 0)
        return 4 * q.elements * entries

    def touched(
        self,
        q: TensorType,
        kv: TensorType,
        sink: TensorType,
        window: TensorType,
        positions: TensorType,
        slots: TensorType,
        starts: TensorType,
        first: TensorType,
        compressed: TensorType | None = None,
        selection: TensorType | None = None,
    ) -> Mapping[str, int]:
        tokens = int(q.shape[0])
        rows = {"window": TensorType(window.dtype, (tokens, *window.shape[1:])).size_bytes}
        if compressed is not None and selection is not None:
            chosen = min(int(selection.shape[1]), int(compressed.shape[1]))
            rows["compressed"] = TensorType(compressed.dtype, (tokens, chosen, compressed.shape[2])).size_bytes
        return rows

    @classmethod
    def examples(cls) -> Iterator[Example]:
        import torch

        normal = seeded(17)

        def ints(*values: int) -> Tensor:
            return torch.tensor(values, dtype=torch.int32)

        for causal, runs, heads, topk, dtype in (
            (True, ((1, 5, 1, 0),), 3, 0, "bf16"),
            (True, ((0, 0, 11, 0), (1, 29, 2, 0)), 3, 5, "bf16"),
            (True, ((1, 20, 3, 19),), 4, 5, "bf16"),
            (False, ((1, 6, 3, 0), (0, 30, 3, 0)), 3, 0, "bf16"),
            (True, ((1, 12, 4, 0),), 2, 6, "f32"),
        ):
            slots = torch.cat([torch.full((n,), slot, dtype=torch.int32) for slot, _, n, _ in runs])
            positions = torch.cat([torch.arange(p, p + n, dtype=torch.int32) for _, p, n, _ in runs])
            first = torch.cat([torch.full((n,), lowest, dtype=torch.int32) for *_, n, lowest in runs])
            begins = [0, *torch.tensor([n for _, _, n, _ in runs]).cumsum(0).tolist()]
            starts = torch.cat([torch.full((r[2],), b, dtype=torch.int32) for r, b in zip(runs, begins, strict=False)])
            tokens = len(positions)
            kv = formats.round_trip(normal(tokens, 64, dtype="bf16"), "fp8_e8m0_32")
            window, compressed = normal(2, 8, 64), normal(2, 12, 64)
            selection = None
            if topk:
                ranked = normal(tokens, 12).argsort(1)[:, :topk].sort(1).values.int()
                selection = torch.cat((ranked[:, : topk - 1], torch.full((tokens, 1), -1, dtype=torch.int32)), 1)
            packed = dtype == "bf16"
            yield Example(
                cls(64**-0.5, causal),
                (
                    normal(tokens, heads, 64, dtype=dtype),
                    kv if packed else kv.float(),
                    normal(heads),
                    formats.pack(window, "fp8_e8m0_32") if packed else window,
                    positions,
                    slots,
                    starts,
                    first,
                    None if not topk else formats.pack(compressed, "fp4_e4m3_16") if packed else compressed,
                    selection,
                ),
            )
