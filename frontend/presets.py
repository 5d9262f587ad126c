"""Named model shapes for random checkpoints: what `v41c init --preset` offers."""

from __future__ import annotations

import dataclasses
import importlib.resources
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from v41c.errors import UsageError
from v41c.frontend.engram import bucket_primes

DATA = Path(str(importlib.resources.files("v41c"))) / "data"
"""Files shipped with the package: the trained checkpoint and the release's configuration."""

TRAINED_CHECKPOINT = DATA / "tiny-v41"
RELEASE_CONFIG = DATA / "release" / "hf_config.json"

_SPECIAL = {"bos_token_id": 0, "eos_token_id": [1], "pad_token_id": 2, "image_token_id": 3, "dspark_noise_token_id": 4}

# What the release and every preset have in common.
_COMMON: dict[str, Any] = {
    **_SPECIAL,
    "dtype": "fp8",
    "expert_dtype": "fp4",
    "score_func": "sqrtsoftplus",
    "route_scale": 1.5,
    "swiglu_limit": 10.0,
    "norm_eps": 1e-20,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_factor": 16.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "engram_max_ngram_size": 4,
    "engram_pad_id": 2,
}

_TINY: dict[str, Any] = {
    "vocab_size": 2048,
    "dim": 64,
    "n_layers": 8,
    "n_mtp_layers": 1,
    "n_heads": 4,
    "head_dim": 64,
    "rope_head_dim": 16,
    "q_lora_rank": 64,
    "o_groups": 2,
    "o_lora_rank": 32,
    "window_size": 32,
    "compress_ratios": [0, 0, 2, 2, 1, 1, 1, 1, 0],
    "kv_source_layers": [2, 4],
    "index_source_layers": [2, 4, 6],
    "index_n_heads": 16,
    "index_head_dim": 32,
    "index_topk": 16,
    "candidate_source_layer": 4,
    "candidate_topk_blocks": 8,
    "candidate_block_size": 4,
    "n_routed_experts": 8,
    "n_activated_experts": 2,
    "moe_inter_dim": 64,
    "original_seq_len": 256,
    "max_position_embeddings": 4096,
    "engram_layer_ids": [1, 3],
    "engram_vocab_size": 1024,
    "engram_n_heads": 2,
    "engram_head_dim": 32,
    "dspark_block_size": 3,
    "dspark_target_layer_ids": [5, 6, 7],
    "dspark_markov_rank": 32,
    "dspark_n_routed_experts": 4,
    "dspark_n_activated_experts": 2,
}

_SMALL: dict[str, Any] = {
    "vocab_size": 8192,
    "dim": 1024,
    "n_layers": 8,
    "n_mtp_layers": 1,
    "n_heads": 8,
    "head_dim": 128,
    "rope_head_dim": 32,
    "q_lora_rank": 256,
    "o_groups": 2,
    "o_lora_rank": 256,
    "window_size": 128,
    "compress_ratios": [0, 0, 2, 2, 1, 1, 1, 1, 0],
    "kv_source_layers": [2, 4],
    "index_source_layers": [2, 4, 6],
    "index_n_heads": 16,
    "index_head_dim": 64,
    "index_topk": 128,
    "candidate_source_layer": 4,
    "candidate_topk_blocks": 64,
    "candidate_block_size": 8,
    "n_routed_experts": 16,
    "n_activated_experts": 4,
    "moe_inter_dim": 320,
    "original_seq_len": 4096,
    "max_position_embeddings": 65536,
    "engram_layer_ids": [1],
    "engram_vocab_size": 8192,
    "engram_n_heads": 4,
    "engram_head_dim": 64,
    "dspark_block_size": 5,
    "dspark_target_layer_ids": [5, 6, 7],
    "dspark_markov_rank": 128,
    "dspark_n_routed_experts": 8,
    "dspark_n_activated_experts": 2,
}

_BF16 = {"dtype": "bf16", "expert_dtype": "bf16"}


@dataclasses.dataclass(frozen=True)
class Preset:
    """A shape of model: its flat configuration but for the compressed vocabulary's size; None means no weights."""

    name: str
    summary: str
    flat: Mapping[str, Any] | None


PRESETS = {
    preset.name: preset
    for preset in (
        Preset("tiny", "8 layers of width 64, every feature on: tests and first steps", _TINY),
        Preset("small", "8 layers of width 1024, about 190 M parameters: benchmarks", _SMALL),
        Preset("small-bf16", "the same, every weight stored as bf16: quantising", _SMALL | _BF16),
        Preset(
            "release-config-only", "the release's configuration without weights: tracing, compiling, accounting", None
        ),
    )
}


def preset_named(name: str) -> Preset:
    """The preset of that name; UsageError lists the names there are."""
    if name not in PRESETS:
        raise UsageError(f"preset {name!r}: expected one of {', '.join(PRESETS)}")
    return PRESETS[name]


def flat_config(preset: Preset, compressed_vocab_size: int) -> dict[str, Any]:
    """The flat configuration of a preset with weights, its Engram sized for the tokenizer's compressed ids."""
    flat = _COMMON | dict(preset.flat or {})
    orders, heads = flat["engram_max_ngram_size"] - 1, flat["engram_n_heads"]
    sizes = bucket_primes(len(flat["engram_layer_ids"]), orders, heads, flat["engram_vocab_size"])
    flat["engram_num_embeddings"] = [sum(layer) for layer in sizes]
    flat["engram_compressed_vocab_size"] = compressed_vocab_size
    return flat


def build_tokenizer(vocab_size: int) -> str:
    """tokenizer.json of a byte-level BPE with exactly `vocab_size` entries, at least the shipped 2048.

    The shipped tokenizer, whose first merges were learned from text, extended by merges of pairs of its word pieces in
    a fixed order: every entry is reachable, and the same size always gives the same file.
    """
    tokenizer: dict[str, Any] = json.loads((TRAINED_CHECKPOINT / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary: dict[str, int] = tokenizer["model"]["vocab"]
    merges: list[list[str]] = tokenizer["model"]["merges"]
    pieces = [piece for piece in vocabulary if piece.isascii() and piece.isalpha() and len(piece) > 1]
    starts = [piece for piece in vocabulary if piece.startswith("Ġ") and piece[1:].isascii() and piece[1:].isalpha()]
    for diagonal in range(len(starts) + len(pieces)):
        for row in range(max(0, diagonal - len(pieces) + 1), min(diagonal + 1, len(starts))):
            if len(vocabulary) >= vocab_size:
                return json.dumps(tokenizer, ensure_ascii=False)
            left, right = starts[row], pieces[diagonal - row]
            if left + right not in vocabulary:
                vocabulary[left + right] = len(vocabulary)
                merges.append([left, right])
    raise UsageError(f"tokenizer of {vocab_size} entries: expected at most {len(vocabulary)}")
