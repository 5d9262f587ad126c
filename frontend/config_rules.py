"""What must hold between the values of a configuration, one rule per line, in the order in which they are reported."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from v41c.errors import ConfigError
from v41c.frontend.config_spelling import shown
from v41c.frontend.engram import bucket_primes

if TYPE_CHECKING:
    from v41c.frontend.config import ModelConfig

BLOCK = 32
"""Elements that share a scale along the reduction axis of a quantised linear, and rows that do in an fp8 weight."""

# The largest value of every count and size, far above the release's and within what kernels index with 32 bits and what
# a list of tensors can be made of. Layer and token numbers have closer rules of their own.
LIMITS = {
    2**31 - 1: ("vocab_size", "max_position_embeddings", "original_seq_len", "vision_min_pixels", "engram_vocab_size"),
    2**40: ("engram_num_embeddings",),
    2**20: (
        *("dim", "head_dim", "rope_head_dim", "q_lora_rank", "o_lora_rank", "moe_inter_dim", "index_head_dim"),
        *("engram_head_dim", "dspark_markov_rank", "vision_dim", "vision_inter_dim", "vision_max_n_token"),
        *("window_size", "index_topk", "candidate_topk_blocks", "candidate_block_size"),
    ),
    2**16: (
        *("n_routed_experts", "n_activated_experts", "dspark_n_routed_experts", "dspark_n_activated_experts"),
        *("n_heads", "o_groups", "index_n_heads", "vision_n_heads", "compress_ratios"),
    ),
    4096: ("n_layers", "vision_n_layers"),
    1024: ("vision_patch_size", "engram_n_heads"),
    1000: ("hc_sinkhorn_iters",),
    512: ("dspark_block_size",),
    64: ("n_mtp_layers", "hc_mult", "engram_max_ngram_size", "vision_downsample_ratio"),
}
WIDEST = 2**20
"""Elements of a token's widest row: all heads, all residual copies, all candidates."""
MOST_EXPERTS = 2**18
"""Routed experts of all layers together: each brings up to six tensors of the checkpoint."""
MOST_BUCKETS = 2**14
"""Engram buckets of all layers together: each brings a search for a prime."""
FLOAT32 = (2.0**-126, 2.0**128 - 2.0**104)
"""Smallest and largest magnitude, zero aside, of a number that kernels carry in f32 at full precision."""

# (holds, flat name of the key to blame, what was expected)
Rule = tuple[bool, str, str]


def check_config(config: ModelConfig, names: Mapping[str, str], where: str) -> None:
    """Raise ConfigError for the first broken rule: `where`, the key as the user spelled it, its value, the rule."""
    groups: tuple[Callable[[ModelConfig], Iterator[Rule]], ...] = (
        _numbers,
        _limits,
        _sizes,
        _layer_plan,
        _selection,
        _candidates,
        _rotary,
        _experts,
        _engram,
        _draft,
        _vision,
        _storage,
    )
    for rules in groups:
        for holds, name, expected in rules(config):
            if not holds:
                value = shown(getattr(config, name))
                raise ConfigError(f"{where}: {names.get(name, name)} = {value}: expected {expected}")


def _positive(config: ModelConfig, *names: str) -> Iterator[Rule]:
    for name in names:
        yield getattr(config, name) > 0, name, "a positive number"


def _layers(values: tuple[int, ...], count: int) -> bool:
    return list(values) == sorted(set(values)) and all(0 <= value < count for value in values)


def _numbers(c: ModelConfig) -> Iterator[Rule]:
    """Every number is finite and fits the types that carry it."""
    for field in dataclasses.fields(c):
        value = getattr(c, field.name)
        if isinstance(value, float):
            yield math.isfinite(value), field.name, "a finite number"
            carried = value == 0 or FLOAT32[0] <= abs(value) <= FLOAT32[1]
            yield carried, field.name, "0 or a magnitude from 1.18e-38 to 3.40e38, the range of f32"
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, int):
                yield -1 <= item < 2**63, field.name, "integers from -1 to 2^63 - 1"


def _limits(c: ModelConfig) -> Iterator[Rule]:
    """Every count and size is one that kernels, indices and tensor lists can hold, and so are their products."""
    for limit, names in LIMITS.items():
        for name in names:
            value = getattr(c, name)
            within = max(value, default=0) <= limit if isinstance(value, tuple) else (value or 0) <= limit
            yield within, name, f"at most {limit}"
    products = (("n_heads", "head_dim"), ("index_n_heads", "index_head_dim"), ("o_groups", "o_lora_rank"))
    for first, second in (*products, ("hc_mult", "dim"), ("candidate_topk_blocks", "candidate_block_size")):
        other = getattr(c, second)
        yield getattr(c, first) * other <= WIDEST, first, f"at most {WIDEST} in all, with {second} {other}"
    experts = c.n_layers * c.n_routed_experts + c.n_mtp_layers * c.draft_routed_experts
    yield experts <= MOST_EXPERTS, "n_routed_experts", f"at most {MOST_EXPERTS} experts in all layers, got {experts}"
    buckets = len(c.engram_layer_ids) * c.engram_columns
    yield buckets <= MOST_BUCKETS, "engram_n_heads", f"at most {MOST_BUCKETS} buckets in all layers, got {buckets}"


def _sizes(c: ModelConfig) -> Iterator[Rule]:
    yield from _positive(c, "vocab_size", "dim", "n_layers", "n_heads", "head_dim", "rope_head_dim", "q_lora_rank")
    yield from _positive(
        c, "o_groups", "o_lora_rank", "window_size", "hc_mult", "hc_sinkhorn_iters", "hc_eps", "norm_eps"
    )
    yield c.n_mtp_layers >= 0, "n_mtp_layers", "0 or more draft layers"
    yield c.n_heads % c.o_groups == 0, "o_groups", f"a divisor of the {c.n_heads} attention heads"
    yield c.head_dim % BLOCK == 0, "head_dim", f"a multiple of {BLOCK}, the group of the cached formats"
    even = c.rope_head_dim % 2 == 0
    yield even and c.rope_head_dim <= c.head_dim, "rope_head_dim", f"an even number up to head_dim {c.head_dim}"
    if c.max_position_embeddings is not None:
        yield from _positive(c, "max_position_embeddings")
    for name, ids in (("bos_id", (c.bos_id,)), ("eos_ids", c.eos_ids), ("pad_id", (c.pad_id,))):
        within = all(token is None or 0 <= token < c.vocab_size for token in ids)
        yield within, name, f"token ids in 0..{c.vocab_size - 1}"


def _layer_plan(c: ModelConfig) -> Iterator[Rule]:
    """Ratios and KV sources: every compressed layer reads the entries of a source of its own ratio."""
    total = c.n_layers + c.n_mtp_layers
    ratios, sources = c.compress_ratios, c.kv_source_layers
    length = f"{total} ratios ({c.n_layers} layers + {c.n_mtp_layers} draft layers), got {len(ratios)}"
    yield len(ratios) == total, "compress_ratios", length
    yield all(ratio >= 0 for ratio in ratios), "compress_ratios", "ratios of 0 or more"
    yield not any(ratios[c.n_layers :]), "compress_ratios", "ratio 0 for every draft layer"
    ordered = f"ascending layer numbers in 0..{c.n_layers - 1}"
    yield _layers(sources, c.n_layers), "kv_source_layers", ordered
    yield _layers(c.index_source_layers, c.n_layers), "index_source_layers", ordered
    for layer in sources:
        yield ratios[layer] > 0, "kv_source_layers", f"sources with a ratio above 0, but layer {layer} has ratio 0"
    for layer in c.index_source_layers:
        yield ratios[layer] > 0, "index_source_layers", f"sources with a ratio above 0, but layer {layer} has ratio 0"
    for layer in range(c.n_layers):
        before = [source for source in sources if source <= layer]
        if ratios[layer] and not before:
            yield False, "kv_source_layers", f"a source at or before layer {layer}, whose ratio is {ratios[layer]}"
        elif ratios[layer] and ratios[layer] != ratios[before[-1]]:
            source = f"ratio {ratios[before[-1]]} of its KV source {before[-1]}"
            yield False, "compress_ratios", f"layer {layer} to have the {source}, got {ratios[layer]}"


def _selection(c: ModelConfig) -> Iterator[Rule]:
    missing = [layer for layer in c.kv_source_layers if layer not in c.index_source_layers]
    yield not missing, "index_source_layers", f"every KV source among them; missing {missing}"
    if c.index_source_layers:
        yield from _positive(c, "index_n_heads", "index_head_dim", "index_topk")
        multiple = f"a multiple of {BLOCK}, the group of the cached index keys"
        yield c.index_head_dim % BLOCK == 0, "index_head_dim", multiple
        yield c.rope_head_dim <= c.index_head_dim, "rope_head_dim", f"at most index_head_dim {c.index_head_dim}"


def _candidates(c: ModelConfig) -> Iterator[Rule]:
    source = c.candidate_source_layer
    if source == -1:
        return
    yield source in c.index_source_layers, "candidate_source_layer", "-1 (off) or one of the index source layers"
    yield from _positive(c, "candidate_topk_blocks", "candidate_block_size")
    for layer in c.index_source_layers:
        if layer > source and c.compress_ratios[layer] != c.compress_ratios[source]:
            shared = f"later index sources of its own ratio {c.compress_ratios[source]}, but layer {layer} differs"
            yield False, "candidate_source_layer", shared


def _rotary(c: ModelConfig) -> Iterator[Rule]:
    yield c.rope_theta > 1, "rope_theta", "a base above 1"
    if any(c.compress_ratios):
        yield c.compress_rope_theta > 1, "compress_rope_theta", "a base above 1"
    yield c.original_seq_len >= 0, "original_seq_len", "0 (no YaRN) or a length"
    if c.original_seq_len:
        yield c.rope_factor >= 1, "rope_factor", "a factor of 1 or more"
        yield from _positive(c, "beta_slow")
        yield c.beta_fast >= c.beta_slow, "beta_fast", f"at least beta_slow {c.beta_slow}"


def _experts(c: ModelConfig) -> Iterator[Rule]:
    yield from _positive(c, "n_routed_experts", "n_activated_experts", "moe_inter_dim", "route_scale", "swiglu_limit")
    yield from _positive(c, "gate_temp")
    limit = f"at most the {c.n_routed_experts} routed experts"
    yield c.n_activated_experts <= c.n_routed_experts, "n_activated_experts", limit
    yield c.n_shared_experts == 1, "n_shared_experts", "1, the number this architecture has"
    yield c.score_func in ("sqrtsoftplus", "softmax", "sigmoid"), "score_func", "sqrtsoftplus, softmax or sigmoid"


def _engram(c: ModelConfig) -> Iterator[Rule]:
    layers, rows = c.engram_layer_ids, c.engram_num_embeddings
    yield _layers(layers, c.n_layers), "engram_layer_ids", f"ascending layer numbers in 0..{c.n_layers - 1}"
    yield len(rows) == len(layers), "engram_num_embeddings", f"one size for each of the {len(layers)} Engram layers"
    if not layers:
        return
    yield from _positive(c, "engram_vocab_size", "engram_n_heads", "engram_head_dim", "engram_compressed_vocab_size")
    yield c.engram_max_ngram_size >= 2, "engram_max_ngram_size", "2 or more"
    yield c.engram_compressed_vocab_size <= c.vocab_size, "engram_compressed_vocab_size", f"at most {c.vocab_size} ids"
    yield 0 <= c.engram_pad_id < c.vocab_size, "engram_pad_id", f"a token id in 0..{c.vocab_size - 1}"
    buckets = (c.engram_max_ngram_size - 1) * c.engram_n_heads
    # Each bucket holds at least engram_vocab_size rows: a cheap bound before any prime is searched.
    least = buckets * max(2, c.engram_vocab_size)
    yield min(rows) >= least, "engram_num_embeddings", f"at least {least} rows for {buckets} buckets"
    sizes = bucket_primes(len(layers), c.engram_max_ngram_size - 1, c.engram_n_heads, c.engram_vocab_size)
    sums = [sum(layer) for layer in sizes]
    yield list(rows) == sums, "engram_num_embeddings", f"the sums of the bucket primes, {sums}"


def _draft(c: ModelConfig) -> Iterator[Rule]:
    if not c.n_mtp_layers:
        return
    yield from _positive(c, "dspark_block_size", "dspark_markov_rank")
    # A verification must not overwrite its own keys: what it wrote could not be taken back.
    longest = f"at least {c.verified_tokens}, dspark_block_size {c.dspark_block_size} and the token before"
    yield c.window_size >= c.verified_tokens, "window_size", longest
    noise = f"a token id in 0..{c.vocab_size - 1}"
    yield 0 <= c.dspark_noise_token_id < c.vocab_size, "dspark_noise_token_id", noise
    targets = c.dspark_target_layer_ids
    ordered = f"one or more ascending layer numbers in 0..{c.n_layers - 1}"
    yield bool(targets) and _layers(targets, c.n_layers), "dspark_target_layer_ids", ordered
    yield c.dspark_n_routed_experts >= 0, "dspark_n_routed_experts", "0 (as in the backbone) or a count"
    activated = f"0 (as in the backbone) to {c.draft_routed_experts}, the draft layers' experts"
    yield 0 <= c.draft_activated_experts <= c.draft_routed_experts, "dspark_n_activated_experts", activated


def _vision(c: ModelConfig) -> Iterator[Rule]:
    yield c.vision_n_layers >= 0, "vision_n_layers", "0 (no vision tower) or a count"
    if not c.vision_n_layers:
        return
    yield from _positive(c, "vision_dim", "vision_n_heads", "vision_inter_dim", "vision_patch_size")
    yield from _positive(c, "vision_downsample_ratio", "vision_max_n_token", "vision_min_pixels")
    yield c.vision_max_n_token >= 4, "vision_max_n_token", "at least 4, the positions of the smallest image"
    heads = f"a multiple of 4 x vision_n_heads {c.vision_n_heads} (rows and columns rotate half the pairs each)"
    yield c.vision_dim % (4 * c.vision_n_heads) == 0, "vision_dim", heads
    yield c.vision_rope_theta > 1, "vision_rope_theta", "a base above 1"
    if c.vision_max_wh_ratio is not None:
        yield c.vision_max_wh_ratio >= 1, "vision_max_wh_ratio", "null or a ratio of 1 or more"
    image = f"a token id in 0..{c.vocab_size - 1}"
    yield 0 <= c.image_token_id < c.vocab_size, "image_token_id", image


def _storage(c: ModelConfig) -> Iterator[Rule]:
    """Formats, and the widths that block scales divide: 32 along every reduction axis of a quantised linear."""
    yield c.dtype in ("fp8", "bf16"), "dtype", "fp8 or bf16"
    yield c.expert_dtype in ("fp4", "fp8", "bf16"), "expert_dtype", "fp4, fp8, bf16, or null for the dense format"
    widths = []
    if c.dtype == "fp8":
        widths += ["dim", "q_lora_rank", "o_lora_rank", "moe_inter_dim"]
        widths += ["engram_head_dim"] if c.engram_layer_ids else []
    elif c.expert_dtype != "bf16":
        widths += ["dim", "moe_inter_dim"]
    for name in widths:
        yield getattr(c, name) % BLOCK == 0, name, f"a multiple of {BLOCK}, the block of the quantised weights"
