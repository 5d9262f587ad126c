"""Every tensor of a checkpoint in release format: its name, stored dtype and shape, derived from the configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from v41c.frontend.config import ModelConfig

Format = Literal["fp4", "fp8", "bf16"]


class TensorSpec(NamedTuple):
    """A stored tensor: safetensors dtype name ("BF16", "F32", "F8_E4M3", "F8_E8M0", "I8") and shape.

    "I8" holds two e2m1 values a byte, the even index in the low nibble: [N, K] is stored as [N, K/2].
    """

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"

    @property
    def size_bytes(self) -> int:
        """Bytes in the file."""
        size = {"F32": 4, "BF16": 2, "F16": 2, "F64": 8, "I64": 8, "I32": 4, "I16": 2, "U16": 2}.get(self.dtype, 1)
        for extent in self.shape:
            size *= extent
        return size


@dataclasses.dataclass(frozen=True)
class TensorFormats:
    """Storage choices that a checkpoint makes and its configuration does not say.

    wo_a: the grouped output projection is used as bf16 whatever its storage, so fp8 models store it either way.
    engram_table: rows with their scales, or plain bf16.
    """

    wo_a: Literal["fp8", "bf16"]
    engram_table: Literal["fp8", "bf16"]

    @staticmethod
    def of(config: ModelConfig) -> TensorFormats:
        """What the release does: both follow `dtype`."""
        fp8 = config.dtype == "fp8"
        return TensorFormats(wo_a="fp8" if fp8 else "bf16", engram_table="fp8" if fp8 else "bf16")


def expected_tensors(config: ModelConfig, formats: TensorFormats | None = None) -> dict[str, TensorSpec]:
    """All tensors of a checkpoint by name, in the order of the layers; vision included where the model has it."""
    return dict(_Catalogue(config, formats or TensorFormats.of(config)).tensors())


def _ceil32(size: int) -> int:
    return -(-size // 32)


class _Catalogue:
    def __init__(self, config: ModelConfig, formats: TensorFormats) -> None:
        self.config = config
        self.formats = formats
        self.dense: Format = "fp8" if config.dtype == "fp8" else "bf16"
        self.expert: Format = (
            "fp4" if config.expert_dtype == "fp4" else "fp8" if config.expert_dtype == "fp8" else "bf16"
        )

    def tensors(self) -> Iterator[tuple[str, TensorSpec]]:
        c = self.config
        yield from _bf16("embed.weight", c.vocab_size, c.dim)
        for layer in range(c.n_layers):
            name = f"layers.{layer}"
            yield from self._block(name, c.n_routed_experts)
            yield from self._engram(f"{name}.engram", layer)
            yield from self._selection(f"{name}.attn", layer)
        yield from _bf16("norm.weight", c.dim)
        yield from _bf16("head.weight", c.vocab_size, c.dim)
        for layer in range(c.n_mtp_layers):
            yield from self._block(f"mtp.{layer}", c.draft_routed_experts)
        if c.has_draft:
            yield from self._draft_ends()
        if c.has_vision:
            yield from self._vision()

    def _linear(self, name: str, rows: int, columns: int, fmt: Format) -> Iterator[tuple[str, TensorSpec]]:
        if fmt == "bf16":
            yield from _bf16(f"{name}.weight", rows, columns)
        elif fmt == "fp8":
            yield f"{name}.weight", TensorSpec("F8_E4M3", (rows, columns))
            yield f"{name}.scale", TensorSpec("F8_E8M0", (_ceil32(rows), _ceil32(columns)))
        else:
            yield f"{name}.weight", TensorSpec("I8", (rows, columns // 2))
            yield f"{name}.scale", TensorSpec("F8_E8M0", (rows, columns // 32))

    def _block(self, name: str, experts: int) -> Iterator[tuple[str, TensorSpec]]:
        """What every layer has, backbone or draft: residual coefficients, attention, experts, norms."""
        c = self.config
        mixes = (2 + c.hc_mult) * c.hc_mult
        for sublayer in ("attn", "ffn"):
            yield from _f32(f"{name}.hc_{sublayer}_fn", mixes, c.hc_mult * c.dim)
            yield from _f32(f"{name}.hc_{sublayer}_base", mixes)
            yield from _f32(f"{name}.hc_{sublayer}_scale", 3)
            yield from _bf16(f"{name}.{sublayer}_norm.weight", c.dim)
        yield from self._attention(f"{name}.attn")
        yield from _bf16(f"{name}.ffn.gate.weight", experts, c.dim)
        yield from _f32(f"{name}.ffn.gate.bias", experts)
        if c.has_vision:
            yield from _f32(f"{name}.ffn.gate.bias_vl", experts)
        for expert in range(experts):
            yield from self._expert(f"{name}.ffn.experts.{expert}", self.expert)
        yield from self._expert(f"{name}.ffn.shared_experts", self.dense)

    def _expert(self, name: str, fmt: Format) -> Iterator[tuple[str, TensorSpec]]:
        c = self.config
        yield from self._linear(f"{name}.w1", c.moe_inter_dim, c.dim, fmt)
        yield from self._linear(f"{name}.w2", c.dim, c.moe_inter_dim, fmt)
        yield from self._linear(f"{name}.w3", c.moe_inter_dim, c.dim, fmt)

    def _attention(self, name: str) -> Iterator[tuple[str, TensorSpec]]:
        c = self.config
        grouped = c.o_groups * c.o_lora_rank
        yield from _f32(f"{name}.attn_sink", c.n_heads)
        yield from self._linear(f"{name}.wq_a", c.q_lora_rank, c.dim, self.dense)
        yield from _bf16(f"{name}.q_norm.weight", c.q_lora_rank)
        yield from self._linear(f"{name}.wq_b", c.n_heads * c.head_dim, c.q_lora_rank, self.dense)
        yield from self._linear(f"{name}.wkv", c.head_dim, c.dim, self.dense)
        yield from _bf16(f"{name}.kv_norm.weight", c.head_dim)
        yield from self._linear(f"{name}.wo_a", grouped, c.n_heads * c.head_dim // c.o_groups, self.formats.wo_a)
        yield from self._linear(f"{name}.wo_b", c.dim, grouped, self.dense)

    def _selection(self, name: str, layer: int) -> Iterator[tuple[str, TensorSpec]]:
        """Compressor (KV sources) and indexer (index sources)."""
        c = self.config
        mode = c.mode(layer)
        if mode == "full":
            yield from _bf16(f"{name}.compressor.norm.weight", c.head_dim)
            yield from _bf16(f"{name}.compressor.wkv.weight", c.head_dim, c.dim)
            if c.ratio(layer) > 1:
                yield from _bf16(f"{name}.compressor.wgate.weight", c.head_dim, c.dim)
            yield from _bf16(f"{name}.indexer.wk.weight", c.index_head_dim, c.head_dim)
            yield from _bf16(f"{name}.indexer.k_norm.weight", c.index_head_dim)
        if mode in ("full", "reindex"):
            rows = c.index_n_heads * c.index_head_dim
            yield from self._linear(f"{name}.indexer.wq_b", rows, c.q_lora_rank, self.dense)
            yield from _bf16(f"{name}.indexer.weights_proj.weight", c.index_n_heads, c.dim)

    def _engram(self, name: str, layer: int) -> Iterator[tuple[str, TensorSpec]]:
        c = self.config
        if layer not in c.engram_layer_ids:
            return
        rows = c.engram_num_embeddings[c.engram_layer_ids.index(layer)]
        yield from _bf16(f"{name}.q_weight", c.hc_mult, c.dim)
        yield from _bf16(f"{name}.k_weight", c.hc_mult, c.dim)
        if self.formats.engram_table == "fp8":
            yield f"{name}.embed.weight", TensorSpec("F8_E4M3", (rows, c.engram_head_dim))
            yield f"{name}.embed.scale", TensorSpec("F8_E8M0", (rows, _ceil32(c.engram_head_dim)))
        else:
            yield from _bf16(f"{name}.embed.weight", rows, c.engram_head_dim)
        columns = c.engram_columns * c.engram_head_dim
        yield from self._linear(f"{name}.wkv", (c.hc_mult + 1) * c.dim, columns, self.dense)

    def _draft_ends(self) -> Iterator[tuple[str, TensorSpec]]:
        """The projection into the first draft layer, and the heads after the last."""
        c = self.config
        yield from self._linear("mtp.0.main_proj", c.dim, len(c.dspark_target_layer_ids) * c.dim, self.dense)
        yield from _bf16("mtp.0.main_norm.weight", c.dim)
        last = f"mtp.{c.n_mtp_layers - 1}"
        yield from _bf16(f"{last}.norm.weight", c.dim)
        yield from _bf16(f"{last}.markov_head.embed.weight", c.vocab_size, c.dspark_markov_rank)
        yield from _bf16(f"{last}.markov_head.head.weight", c.vocab_size, c.dspark_markov_rank)
        yield from _bf16(f"{last}.confidence_head.proj.weight", 1, c.dim + c.dspark_markov_rank)

    def _vision(self) -> Iterator[tuple[str, TensorSpec]]:
        c = self.config
        width = c.vision_dim
        for delimiter in ("image_start", "image_end", "image_newline"):
            yield from _bf16(delimiter, c.dim)
        yield from _biased("vision.patch_embed.proj", width, 3 * c.vision_patch_size**2)
        for layer in range(c.vision_n_layers):
            name = f"vision.blocks.{layer}"
            yield from _bf16(f"{name}.norm1.weight", width)
            yield from _biased(f"{name}.attn.wqkv", 3 * width, width)
            yield from _biased(f"{name}.attn.wo", width, width)
            yield from _bf16(f"{name}.norm2.weight", width)
            yield from _bf16(f"{name}.mlp.w1.weight", 2 * c.vision_inter_dim, width)
            yield from _bf16(f"{name}.mlp.w2.weight", width, c.vision_inter_dim)
        yield from _bf16("vision.norm.weight", width)
        yield from _biased("aligner.w1", c.dim, c.vision_downsample_ratio**2 * width)
        yield from _biased("aligner.w2", c.dim, c.dim)


def _bf16(name: str, *shape: int) -> Iterator[tuple[str, TensorSpec]]:
    yield name, TensorSpec("BF16", shape)


def _f32(name: str, *shape: int) -> Iterator[tuple[str, TensorSpec]]:
    yield name, TensorSpec("F32", shape)


def _biased(name: str, rows: int, columns: int) -> Iterator[tuple[str, TensorSpec]]:
    yield from _bf16(f"{name}.weight", rows, columns)
    yield from _bf16(f"{name}.bias", rows)
