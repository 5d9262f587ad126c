"""The eager model: the architecture in plain PyTorch, and the reference that engines are compared with.

Parameters are named as in the checkpoint. States (caches) are tensors by name that a step updates in place:

    layers.N.window      u8 [S, W, row]        packed fp8 keys, a ring by position mod W
    layers.N.compressed  u8 [S, C, row]        packed fp4 rows of a KV source
    layers.N.index_keys  u8 [S, C, row]        packed fp4 index keys of a KV source
    layers.N.partial     f32 [S, L, 2, HD]     open group of a KV source with ratio r > 1, a ring by position mod L ≥ r
    engram.history       i32 [S, L]            last compressed ids, a ring by position mod L ≥ n − 1
    mtp.N.window         u8 [S, W, row]        ring of a draft layer

In exact arithmetic the u8 states are f32 [S, …, elements]. Axis 1 holds rows by position, and no ring is shorter than a
verification of drafts: what its tokens wrote can be taken back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from v41c.errors import UsageError
from v41c.frontend.apply import apply
from v41c.frontend.arithmetic import Arithmetic
from v41c.frontend.block import Block
from v41c.frontend.config import ModelConfig
from v41c.frontend.draft import DraftBlock, propose, write_context
from v41c.frontend.layers import Norm, Step, Table, parameter
from v41c.frontend.tensor_names import TensorFormats
from v41c.frontend.vision import Aligner, Patches, Tower
from v41c.ir.formats import FORMATS
from v41c.ir.ops.compress_tokens import CompressTokens
from v41c.ir.ops.concat import Concat
from v41c.ir.ops.embedding import Embedding
from v41c.ir.ops.gather_rows import GatherRows
from v41c.ir.ops.hc_mix import HcMix
from v41c.ir.ops.history_write import HistoryWrite
from v41c.ir.ops.image_mask import ImageMask
from v41c.ir.ops.linear import Linear as LinearOp
from v41c.ir.ops.place_images import PlaceImages
from v41c.ir.ops.rope_table import RopeTable
from v41c.ir.ops.run_starts import RunStarts
from v41c.ir.ops.start_stream import StartStream
from v41c.ir.ops.stream_mean import StreamMean

Record = Callable[[str, Tensor], None]


def ignore(name: str, tensor: Tensor) -> None:
    """The record of a step nobody looks into."""


class Model(nn.Module):
    """The model. `engram_pad` is the compressed id of the pad token, 0 without Engram."""

    layers: Sequence[Block]
    mtp: Sequence[DraftBlock]
    compressed_ids: Tensor

    def __init__(
        self, config: ModelConfig, arithmetic: Arithmetic, formats: TensorFormats, engram_pad: int = 0
    ) -> None:
        super().__init__()
        c = config
        self.config, self.arithmetic = c, arithmetic
        self.embed = Table(c.vocab_size, c.dim, "bf16")
        self.layers = nn.ModuleList(Block(c, arithmetic, layer, formats, engram_pad) for layer in range(c.n_layers))  # type: ignore[assignment]
        self.norm = Norm(c.dim, c.norm_eps)
        self.head = Table(c.vocab_size, c.dim, "bf16")
        self.mtp = nn.ModuleList(DraftBlock(c, arithmetic, index, formats) for index in range(c.n_mtp_layers))  # type: ignore[assignment]
        if c.has_vision:
            self.vision, self.aligner = Tower(c, arithmetic), Aligner(c, arithmetic)
            self.image_start, self.image_newline, self.image_end = (parameter(torch.bfloat16, c.dim) for _ in range(3))
        if c.has_engram:
            self.register_buffer("compressed_ids", torch.zeros(c.vocab_size, dtype=torch.int32), persistent=False)

    def new_states(self, slots: int, context: int) -> dict[str, Tensor]:
        """Empty states for `slots` sequences of up to `context` tokens."""
        return {
            name: torch.zeros(shape, dtype=dtype)
            for name, (dtype, shape) in state_shapes(self.config, self.arithmetic, slots, context).items()
        }

    def forward(
        self,
        tokens: Tensor | Sequence[int],
        states: dict[str, Tensor] | None = None,
        position: int = 0,
        images: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Logits f32 [T, V] after each of `tokens` [T], which stand at `position`, `position` + 1, … of one sequence.

        Without `states` the sequence starts fresh. With them it continues where they stand, and they are updated.
        images: `image_rows` i32 [T] and `image_values` [I, D], see `PlaceImages`.
        """
        tokens = torch.as_tensor(tokens, dtype=torch.int32)
        if tokens.dim() != 1 or not len(tokens):
            raise UsageError(f"tokens: expected the ids of one sequence, got shape {list(tokens.shape)}")
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self.config.vocab_size:
            raise UsageError(f"tokens: expected ids of 0 to {self.config.vocab_size - 1}, got {low} to {high}")
        count = len(tokens)
        states = self.new_states(1, position + count) if states is None else states
        positions = torch.arange(position, position + count, dtype=torch.int32)
        same = torch.zeros_like(positions)
        rows = torch.arange(count, dtype=torch.int32)
        image_rows, image_values = images or (None, None)
        return self.step(tokens, positions, same, same, rows, states, image_rows=image_rows, image_values=image_values)[
            0
        ]

    def step(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        first: Tensor,
        rows: Tensor,
        states: dict[str, Tensor],
        record: Record = ignore,
        kept: Tensor | None = None,
        image_rows: Tensor | None = None,
        image_values: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Backbone over flattened tokens i32 [T]: logits f32 [R, V] of `rows` i32 [R], and what the draft head reads.

        The second result [T, targets·D] is None without a draft head. kept: see `Step`, 0 for every token when None.
        image_rows, image_values: what stands in the place of which tokens, see `PlaceImages`; nothing when None.
        """
        step = self.new_step(tokens, positions, slots, first, states, record, kept)
        step.image_rows, step.image_values = image_rows, image_values
        stream, mix = self.embed_tokens(step)
        stream, mix, taps = self.run_layers(stream, mix, step)
        if self.config.has_engram:
            apply(HistoryWrite(), states["engram.history"], step.compressed_ids, positions, slots)
        hidden = self.norm(apply(GatherRows(), apply(HcMix(), stream, mix), rows))
        logits = apply(LinearOp("f32"), hidden, self.head.weight, None)
        record("logits", logits)
        return logits, taps

    def see(self, patches: Patches, record: Record = ignore) -> Tensor:
        """What the vision tower makes of images: [R, D], in the dtype of activations."""
        seen = self.vision(patches)
        record("vit_out", seen)
        features: Tensor = self.aligner(seen, patches.sources)
        record("features", features)
        return features

    def embed_tokens(self, step: Step) -> tuple[Tensor, Tensor]:
        """Stream and mix entering layer 0."""
        out = self.arithmetic.activation
        embedded = apply(Embedding(out), step.tokens, self.embed.weight)
        if step.image_rows is not None and step.image_values is not None:
            delimiters = (self.image_start, self.image_newline, self.image_end)
            embedded = apply(PlaceImages(), embedded, step.image_rows, step.image_values, *delimiters)
        return apply(StartStream(self.config.hc_mult), embedded)  # type: ignore[no-any-return]

    def run_layers(self, stream: Tensor, mix: Tensor, step: Step) -> tuple[Tensor, Tensor, Tensor | None]:
        """Stream and mix after the last layer, and the draft head's input."""
        targets = self.config.dspark_target_layer_ids if self.config.has_draft else ()
        taps: Tensor | None = None
        for layer, block in enumerate(self.layers):
            stream = block.add_engram(stream, step)
            step.record(f"layers.{layer}.in", stream)
            if layer in targets:
                mean = apply(StreamMean(), stream)
                taps = mean if taps is None else apply(Concat(), taps, mean)
            stream, mix = block(stream, mix, step)
        if taps is not None:
            step.record("main_hidden", taps)
        return stream, mix, taps

    def draft_context(self, main_hidden: Tensor, positions: Tensor, slots: Tensor, states: dict[str, Tensor]) -> None:
        """Update the draft rings with accepted backbone positions."""
        step = self._bare_step(positions, positions, slots, positions, states, ignore)
        write_context(self.mtp, main_hidden, step)

    def draft(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        first: Tensor,
        states: dict[str, Tensor],
        record: Record = ignore,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Draft blocks [last, noise, …] at the positions after the accepted ones: logits, drafts, confidence."""
        step = self._bare_step(tokens, positions, slots, first, states, record)
        return propose(self.mtp, self.embed.weight, self.head.weight, self.config.hc_mult, step)

    def _bare_step(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        first: Tensor,
        states: dict[str, Tensor],
        record: Record,
    ) -> Step:
        """What window-mode layers need."""
        starts = apply(RunStarts(), positions, slots)
        step = Step(self.arithmetic, tokens, positions, slots, first, starts, states, record)
        step.tables[0, 0] = apply(self.rope_table(0, 0), positions)
        return step

    def new_step(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        first: Tensor,
        states: dict[str, Tensor],
        record: Record = ignore,
        kept: Tensor | None = None,
    ) -> Step:
        """What the layers of the backbone read of a step."""
        c = self.config
        step = self._bare_step(tokens, positions, slots, first, states, record)
        step.kept = torch.zeros_like(positions) if kept is None else kept
        for ratio in sorted(set(c.compress_ratios[: c.n_layers]) - {0}):
            for offset in sorted({0, 1 - ratio}, reverse=True):
                step.tables[ratio, offset] = apply(self.rope_table(ratio, offset), positions)
        if c.has_vision:
            step.image = apply(ImageMask(c.image_token_id), tokens)
        if c.has_engram:
            step.compressed_ids = apply(CompressTokens(c.image_token_id), tokens, self.compressed_ids)
        return step

    def rope_table(self, ratio: int, offset: int) -> RopeTable:
        """Angles of a layer's ratio: window layers use `rope_theta` plain, others their own theta with YaRN."""
        c = self.config
        theta, original = (c.compress_rope_theta, c.original_seq_len) if ratio else (c.rope_theta, 0)
        return RopeTable(c.rope_head_dim, theta, c.rope_factor, original, c.beta_fast, c.beta_slow, offset)


def state_shapes(
    config: ModelConfig, arithmetic: Arithmetic, slots: int, context: int
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Dtype and shape of every state."""
    c = config

    def rows(length: int, width: int, format: str) -> tuple[torch.dtype, tuple[int, ...]]:
        if not arithmetic.round_trips:
            return torch.float32, (slots, length, width)
        return torch.uint8, (slots, length, FORMATS[format].row_bytes(width))

    shapes = {f"layers.{layer}.window": rows(c.window_size, c.head_dim, "fp8_e8m0_32") for layer in range(c.n_layers)}
    for layer in c.kv_source_layers:
        ratio = c.ratio(layer)
        capacity = -(-context // ratio)
        shapes[f"layers.{layer}.compressed"] = rows(capacity, c.head_dim, "fp4_e4m3_16")
        shapes[f"layers.{layer}.index_keys"] = rows(capacity, c.index_head_dim, "fp4_e8m0_32")
        if ratio > 1:
            shapes[f"layers.{layer}.partial"] = (torch.float32, (slots, max(ratio, c.verified_tokens), 2, c.head_dim))
    if c.has_engram:
        length = max(c.engram_max_ngram_size - 1, c.verified_tokens)
        shapes["engram.history"] = (torch.int32, (slots, length))
    for index in range(c.n_mtp_layers):
        shapes[f"mtp.{index}.window"] = rows(c.window_size, c.head_dim, "fp8_e8m0_32")
    return shapes
