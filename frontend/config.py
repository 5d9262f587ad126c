"""The model configuration: every hyper-parameter under its flat name, and the layer plan that follows from it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_type_hints

from v41c.errors import ConfigError, UsageError
from v41c.frontend.config_rules import check_config
from v41c.frontend.config_spelling import Spelled, unify

Mode = Literal["window", "full", "reindex", "reuse"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One model. Two configs are equal when they describe the same computation, whichever spelling they were read from.

    Fields carry the flat spelling of the release's inference configuration. A feature that is off has its "off" value:
    an empty tuple, 0, or -1 for `candidate_source_layer` and `image_token_id`.
    """

    # Sizes
    vocab_size: int
    dim: int
    n_layers: int
    n_mtp_layers: int = 0
    n_heads: int
    head_dim: int
    rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    norm_eps: float

    # Attention plan: one ratio per backbone and draft layer, sources by layer number
    window_size: int
    compress_ratios: tuple[int, ...]
    kv_source_layers: tuple[int, ...] = ()
    index_source_layers: tuple[int, ...] = ()
    index_n_heads: int = 0
    index_head_dim: int = 0
    index_topk: int = 0
    candidate_source_layer: int = -1
    candidate_topk_blocks: int = 0
    candidate_block_size: int = 0

    # Rotary embedding; original_seq_len 0 means no YaRN, and then the three numbers after it say nothing
    rope_theta: float
    compress_rope_theta: float = 0.0
    original_seq_len: int = 0
    rope_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    # Mixture of experts
    n_routed_experts: int
    n_shared_experts: int = 1
    n_activated_experts: int
    moe_inter_dim: int
    score_func: str
    route_scale: float
    swiglu_limit: float
    norm_topk_prob: bool = True
    gate_temp: float = 1.0

    # Residual copies
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float

    # Engram
    engram_layer_ids: tuple[int, ...] = ()
    engram_num_embeddings: tuple[int, ...] = ()
    engram_vocab_size: int = 0
    engram_max_ngram_size: int = 0
    engram_n_heads: int = 0
    engram_head_dim: int = 0
    engram_pad_id: int = 0
    engram_compressed_vocab_size: int = 0

    # Draft head; expert counts of 0 mean the backbone's
    dspark_block_size: int = 0
    dspark_noise_token_id: int = -1
    dspark_target_layer_ids: tuple[int, ...] = ()
    dspark_markov_rank: int = 0
    dspark_n_routed_experts: int = 0
    dspark_n_activated_experts: int = 0

    # Vision
    vision_n_layers: int = 0
    vision_dim: int = 0
    vision_n_heads: int = 0
    vision_inter_dim: int = 0
    vision_patch_size: int = 0
    vision_downsample_ratio: int = 0
    vision_max_n_token: int = 0
    vision_min_pixels: int = 0
    vision_rope_theta: float = 0.0
    vision_max_wh_ratio: float | None = None
    image_token_id: int = -1

    # Storage: "fp8" or "bf16" dense linears; "fp4", "fp8" or "bf16" routed experts
    dtype: str
    expert_dtype: str

    # Around the computation, not part of it
    bos_id: int | None = dataclasses.field(default=None, compare=False)
    eos_ids: tuple[int, ...] = dataclasses.field(default=(), compare=False)
    pad_id: int | None = dataclasses.field(default=None, compare=False)
    max_position_embeddings: int | None = dataclasses.field(default=None, compare=False)
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict, compare=False)

    @property
    def has_engram(self) -> bool:
        """Whether any layer adds an Engram lookup."""
        return bool(self.engram_layer_ids)

    @property
    def has_draft(self) -> bool:
        """Whether the checkpoint carries a draft head."""
        return self.n_mtp_layers > 0

    @property
    def has_vision(self) -> bool:
        """Whether the checkpoint carries a vision tower."""
        return self.vision_n_layers > 0

    @property
    def n_encoder_layers(self) -> int:
        """Layers before the last KV source; the decoder is the rest. 0 when nothing is compressed."""
        return self.kv_source_layers[-1] if self.kv_source_layers else 0

    @property
    def engram_columns(self) -> int:
        """Rows that one token looks up per Engram layer: (n-gram sizes 2..N) x heads."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads if self.has_engram else 0

    @property
    def verified_tokens(self) -> int:
        """Tokens of the longest verification: an accepted one and a block of drafts; 0 without a draft head."""
        return self.dspark_block_size + 1 if self.has_draft else 0

    @property
    def draft_routed_experts(self) -> int:
        """Routed experts of each draft layer."""
        return self.dspark_n_routed_experts or self.n_routed_experts

    @property
    def draft_activated_experts(self) -> int:
        """Experts that a token visits in each draft layer."""
        return self.dspark_n_activated_experts or self.n_activated_experts

    def ratio(self, layer: int) -> int:
        """Tokens per compressed entry of a layer, 0 for window mode. Draft layers follow the backbone's numbering."""
        return self.compress_ratios[layer]

    def mode(self, layer: int) -> Mode:
        """What a layer attends to and selects (DeepSeek-V4.1 report, CSA2)."""
        if self.ratio(layer) == 0:
            return "window"
        if layer in self.kv_source_layers:
            return "full"
        return "reindex" if layer in self.index_source_layers else "reuse"

    def kv_source(self, layer: int) -> int | None:
        """The layer whose compressed entries and index keys this layer reads; None in window mode."""
        return self._last(self.kv_source_layers, layer)

    def index_source(self, layer: int) -> int | None:
        """The layer whose selection this layer uses (itself in modes full and reindex); None in window mode."""
        return self._last(self.index_source_layers, layer)

    def candidate_source(self, layer: int) -> int | None:
        """The layer whose candidate pool restricts this layer's own selection; None where it scores everything."""
        source = self.candidate_source_layer
        return source if source >= 0 and layer > source and layer in self.index_source_layers else None

    def _last(self, sources: tuple[int, ...], layer: int) -> int | None:
        if self.ratio(layer) == 0:
            return None
        return max(source for source in sources if source <= layer)

    def to_flat(self) -> dict[str, Any]:
        """The flat spelling as a JSON-ready dictionary that `parse_config` reads back to an equal config."""
        usual = {"bos_id": "bos_token_id", "eos_ids": "eos_token_id", "pad_id": "pad_token_id"}
        flat: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name != "extra" and (value is not None or field.name == "vision_max_wh_ratio"):
                flat[usual.get(field.name, field.name)] = list(value) if isinstance(value, tuple) else value
        return flat | {key: value for key, value in self.extra.items() if key not in flat}


def parse_config(raw: Mapping[str, Any], where: str = "config") -> ModelConfig:
    """A validated config from decoded JSON in either spelling; ConfigError names `where`, the key and its value."""
    types = get_type_hints(ModelConfig)
    del types["extra"]
    spelled = unify(raw, types, where)
    _require(spelled, where)
    config = ModelConfig(**spelled.values, extra=spelled.extra)
    check_config(config, spelled.names, where)
    return config


def read_config(path: str | Path) -> ModelConfig:
    """Read a checkpoint folder's configuration (config.json, else hf_config.json), or a JSON file given by name.

    UsageError for a path where nothing is. ConfigError in one line: no such file in the folder, no JSON object, a key
    missing, of another type, or contradicting others.
    """
    file = Path(path)
    if not file.exists():
        raise UsageError(f"{file}: expected a checkpoint folder or a configuration, found nothing")
    if file.is_dir():
        names = [file / "config.json", file / "hf_config.json"]
        found = [name for name in names if name.is_file()]
        if not found:
            raise ConfigError(f"{file}: expected config.json or hf_config.json in this folder, found neither")
        file = found[0]
    return parse_config(_read_json(file), str(file))


def _require(spelled: Spelled, where: str) -> None:
    for field in dataclasses.fields(ModelConfig):
        optional = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        if not optional and field.name not in spelled.values:
            raise ConfigError(f"{where}: {spelled.names[field.name]} is missing: every model needs it")


def _read_json(file: Path) -> Mapping[str, Any]:
    try:
        # Integers stay exact: Python's reader never goes through doubles.
        raw = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=_unique, parse_constant=_finite)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        detail = " ".join(str(error).split())
        raise ConfigError(f"{file}: expected a JSON configuration, got something else: {detail}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{file}: expected a JSON object, got {type(raw).__name__}")
    return raw


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys: dict[str, Any] = {}
    for key, value in pairs:
        if key in keys:
            raise ValueError(f"key {key!r} appears twice")
        keys[key] = value
    return keys


def _finite(constant: str) -> float:
    raise ValueError(f"{constant} is not a number that a configuration can hold")
