"""Configurations: two spellings, one meaning; an inconsistency is refused in one line naming key, value and rule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from v41c.errors import ConfigError, UsageError
from v41c.frontend.config import ModelConfig, parse_config, read_config
from v41c.frontend.config_rules import LIMITS

ROOT = Path(__file__).resolve().parents[2]
CASES = [ROOT / "tests" / "data" / "golden" / name for name in ("case_00", "case_02", "case_04")]
RELEASE = ROOT / "v41c" / "data" / "release"
TRAINED = ROOT / "v41c" / "data" / "tiny-v41"
ABSENT = object()


def raw(folder: Path, name: str = "config.json") -> dict[str, Any]:
    value: dict[str, Any] = json.loads((folder / name).read_text(encoding="utf-8"))
    return value


def changed(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(json.dumps(base))
    for path, value in changes.items():
        table = result
        *parents, key = path.split(".")
        for parent in parents:
            table = table[parent]
        if value is ABSENT:
            del table[key]
        else:
            table[key] = value
    return result


@pytest.mark.parametrize("folder", [*CASES, RELEASE], ids=lambda folder: folder.name)
def test_both_spellings_mean_the_same(folder: Path) -> None:
    flat, nested = read_config(folder / "config.json"), read_config(folder / "hf_config.json")
    assert flat == nested
    assert read_config(folder) == flat
    assert (nested.bos_id, nested.eos_ids, nested.pad_id) == (0, (1,), 2)
    assert nested.extra["hidden_act"] == "silu"


@pytest.mark.parametrize("folder", [*CASES, RELEASE, TRAINED], ids=lambda folder: folder.name)
@pytest.mark.parametrize("name", ["config.json", "hf_config.json"])
def test_flat_form_reads_back(folder: Path, name: str) -> None:
    if not (folder / name).exists():
        name = "config.json"
    config = read_config(folder / name)
    back = parse_config(json.loads(json.dumps(config.to_flat())))
    assert back == config
    assert (back.eos_ids, back.max_position_embeddings) == (config.eos_ids, config.max_position_embeddings)


def test_release_values() -> None:
    config = read_config(RELEASE)
    assert (config.dim, config.n_layers, config.n_mtp_layers, config.vocab_size) == (5120, 40, 3, 129280)
    assert (config.rope_theta, config.compress_rope_theta, config.rope_factor) == (10000.0, 160000.0, 16.0)
    assert (config.norm_topk_prob, config.gate_temp, config.norm_eps) == (True, 1.0, 1e-20)
    assert config.engram_num_embeddings == (384006168, 384016682)
    assert (config.dtype, config.expert_dtype, config.vision_max_wh_ratio) == ("fp8", "fp4", None)
    assert read_config(RELEASE / "hf_config.json").max_position_embeddings == 1048576


def test_release_layer_plan() -> None:
    config = read_config(RELEASE)
    modes = [config.mode(layer) for layer in range(43)]
    assert [layer for layer, mode in enumerate(modes) if mode == "window"] == [0, 1, 40, 41, 42]
    assert [layer for layer, mode in enumerate(modes) if mode == "full"] == [2, 8, 14, 20]
    assert [layer for layer, mode in enumerate(modes) if mode == "reindex"] == [24, 28, 32, 36]
    assert modes.count("reuse") == 30
    assert config.n_encoder_layers == 20
    assert (config.kv_source(1), config.kv_source(7), config.kv_source(39)) == (None, 2, 20)
    assert (config.index_source(23), config.index_source(24), config.index_source(39)) == (20, 24, 36)
    assert [config.candidate_source(layer) for layer in (14, 20, 24, 25, 36)] == [None, None, 20, None, 20]
    assert config.engram_columns == 24
    assert (config.draft_routed_experts, config.draft_activated_experts) == (128, 3)


def test_features_that_are_off() -> None:
    config = read_config(CASES[1])
    assert (config.has_engram, config.has_draft, config.has_vision) == (False, False, False)
    assert config.engram_columns == 0
    assert config.candidate_source(5) is None
    assert (config.dtype, config.expert_dtype) == ("bf16", "bf16")


def test_window_only_model_needs_no_selection_keys() -> None:
    gone = {key: ABSENT for key in raw(CASES[1]) if key.startswith(("index_", "candidate_", "kv_", "compress_rope"))}
    config = parse_config(changed(raw(CASES[1]), gone | {"compress_ratios": [0] * 6}))
    assert config.n_encoder_layers == 0
    assert {config.mode(layer) for layer in range(6)} == {"window"}


def test_missing_optional_keys_have_the_stated_meaning() -> None:
    gone = {key: ABSENT for key in raw(CASES[0]) if key.startswith("vision_")}
    gone |= {key: ABSENT for key in ("norm_topk_prob", "gate_temp", "dspark_n_routed_experts", "image_token_id")}
    config = parse_config(changed(raw(CASES[0]), gone | {"dspark_n_activated_experts": 0, "expert_dtype": None}))
    assert (config.norm_topk_prob, config.gate_temp, config.has_vision) == (True, 1.0, False)
    assert (config.draft_routed_experts, config.draft_activated_experts) == (8, 3)
    assert config.expert_dtype == "fp8"


def test_unknown_keys_are_kept_and_integers_stay_exact() -> None:
    config = parse_config(changed(raw(TRAINED), {"note": {"seed": 2**63 + 1}}))
    assert config.extra["note"] == {"seed": 2**63 + 1}
    assert config == read_config(TRAINED)
    assert config.to_flat()["note"] == {"seed": 2**63 + 1}


def test_integers_beyond_doubles_survive_the_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(changed(raw(TRAINED), {"seed": 2**53 + 1})))
    assert read_config(tmp_path).extra["seed"] == 2**53 + 1


def test_rope_parameters_of_newer_files() -> None:
    nested = changed(raw(CASES[0], "hf_config.json"), {"text_config.rope_scaling": ABSENT})
    yarn = {"rope_type": "yarn", "factor": 16, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1}
    one = changed(nested, {"text_config.rope_parameters": yarn | {"rope_theta": 10000.0}})
    two = {"main": {"rope_type": "default", "rope_theta": 10000.0}, "compress": yarn | {"rope_theta": 160000.0}}
    assert parse_config(one) == read_config(CASES[0])
    assert parse_config(changed(nested, {"text_config.rope_parameters": two})) == read_config(CASES[0])
    wrong = changed(nested, {"text_config.rope_parameters": yarn | {"rope_theta": 5000.0}})
    said = r"text_config.rope_theta = 10000.0 contradicts rope_parameters.rope_theta = 5000.0"
    with pytest.raises(ConfigError, match=said):
        parse_config(wrong)


# One line per rule: changes to case_00's flat configuration, and the start of the message.
BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"dim": ABSENT}, "expected a model configuration (dim, or text_config)"),
    ({"n_heads": ABSENT}, "n_heads is missing: every model needs it"),
    ({"dim": 96.0}, "dim = 96.0: expected an integer"),
    ({"dim": True}, "dim = true: expected an integer"),
    ({"dim": "96"}, 'dim = "96": expected an integer'),
    ({"norm_topk_prob": 1}, "norm_topk_prob = 1: expected true or false"),
    ({"route_scale": "1.5"}, 'route_scale = "1.5": expected a number'),
    ({"vision_max_wh_ratio": "wide"}, 'vision_max_wh_ratio = "wide": expected a number or null'),
    ({"score_func": 3}, "score_func = 3: expected a string"),
    ({"compress_ratios": 2}, "compress_ratios = 2: expected a list of integers"),
    ({"kv_source_layers": [2, 4.5]}, "kv_source_layers = [2, 4.5]: expected a list of integers"),
    ({"hidden_size": 128}, "dim = 96 contradicts hidden_size = 128"),
    ({"num_hidden_layers": 9}, "n_layers = 8 contradicts num_hidden_layers = 9"),
    ({"vocab_size": 2**70}, f"vocab_size = {2**70}: expected integers from -1 to 2^63 - 1"),
    ({"vocab_size": 2**31}, "vocab_size = 2147483648: expected at most 2147483647"),
    ({"n_heads": 0}, "n_heads = 0: expected a positive number"),
    ({"window_size": 0}, "window_size = 0: expected a positive number"),
    ({"hc_eps": 0.0}, "hc_eps = 0.0: expected a positive number"),
    ({"o_groups": 3}, "o_groups = 3: expected a divisor of the 4 attention heads"),
    ({"head_dim": 72}, "head_dim = 72: expected a multiple of 32"),
    ({"rope_head_dim": 15}, "rope_head_dim = 15: expected an even number up to head_dim 64"),
    ({"rope_head_dim": 66}, "rope_head_dim = 66: expected an even number up to head_dim 64"),
    ({"rope_head_dim": 34}, "rope_head_dim = 34: expected at most index_head_dim 32"),
    ({"eos_token_id": [1, 512]}, "eos_token_id = [1, 512]: expected token ids in 0..511"),
    ({"n_mtp_layers": 2}, "compress_ratios = [0, 0, 2, 2, 1, 1, 1, 1, 0, 0, 0]: expected 10 ratios"),
    ({"compress_ratios": [0, 0, 2, 2, 1, 1, 1, 1]}, "compress_ratios = [0, 0, 2, 2, 1, 1, 1, 1]: expected 11 ratios"),
    (
        {"compress_ratios": [0, 0, 2, 2, 1, 1, 1, 1, 0, 0, 1]},
        "compress_ratios = [0, 0, 2, 2, 1, 1, 1, 1, 0, 0, 1]: expected ratio 0 for every draft layer",
    ),
    ({"compress_ratios": [0, 0, 2, 2, 1, 1, 1, -1, 0, 0, 0]}, "compress_ratios = [0, 0, 2, 2, 1, 1, 1, -1, 0, 0, 0]"),
    ({"kv_source_layers": [4, 2]}, "kv_source_layers = [4, 2]: expected ascending layer numbers in 0..7"),
    ({"kv_source_layers": [2, 2, 4]}, "kv_source_layers = [2, 2, 4]: expected ascending layer numbers in 0..7"),
    ({"kv_source_layers": [2, 8]}, "kv_source_layers = [2, 8]: expected ascending layer numbers in 0..7"),
    ({"kv_source_layers": [1, 2, 4]}, "kv_source_layers = [1, 2, 4]: expected sources with a ratio above 0"),
    ({"kv_source_layers": [4]}, "kv_source_layers = [4]: expected a source at or before layer 2, whose ratio is 2"),
    ({"kv_source_layers": []}, "kv_source_layers = []: expected a source at or before layer 2, whose ratio is 2"),
    (
        {"kv_source_layers": [2]},
        "compress_ratios = [0, 0, 2, 2, 1, 1, 1, 1, 0, 0, 0]: expected layer 4 to have the ratio 2",
    ),
    ({"index_source_layers": [0, 2, 4]}, "index_source_layers = [0, 2, 4]: expected sources with a ratio above 0"),
    ({"index_source_layers": [2, 6]}, "index_source_layers = [2, 6]: expected every KV source among them; missing [4]"),
    ({"index_n_heads": 0}, "index_n_heads = 0: expected a positive number"),
    ({"index_topk": -1}, "index_topk = -1: expected a positive number"),
    ({"index_head_dim": 48}, "index_head_dim = 48: expected a multiple of 32"),
    ({"candidate_source_layer": 5}, "candidate_source_layer = 5: expected -1 (off) or one of the index source layers"),
    ({"candidate_source_layer": 2}, "candidate_source_layer = 2: expected later index sources of its own ratio 2"),
    ({"candidate_topk_blocks": 0}, "candidate_topk_blocks = 0: expected a positive number"),
    ({"candidate_block_size": 0}, "candidate_block_size = 0: expected a positive number"),
    ({"rope_theta": 1.0}, "rope_theta = 1.0: expected a base above 1"),
    ({"compress_rope_theta": ABSENT}, "compress_rope_theta = 0.0: expected a base above 1"),
    ({"original_seq_len": -1}, "original_seq_len = -1: expected 0 (no YaRN) or a length"),
    ({"rope_factor": 0.5}, "rope_factor = 0.5: expected a factor of 1 or more"),
    ({"beta_slow": 0}, "beta_slow = 0.0: expected a positive number"),
    ({"beta_fast": 0.5}, "beta_fast = 0.5: expected at least beta_slow 1.0"),
    ({"n_activated_experts": 9}, "n_activated_experts = 9: expected at most the 8 routed experts"),
    ({"n_shared_experts": 2}, "n_shared_experts = 2: expected 1"),
    ({"score_func": "tanh\n"}, 'score_func = "tanh\\n": expected sqrtsoftplus, softmax or sigmoid'),
    ({"gate_temp": 0}, "gate_temp = 0.0: expected a positive number"),
    ({"engram_layer_ids": [3, 1]}, "engram_layer_ids = [3, 1]: expected ascending layer numbers in 0..7"),
    (
        {"engram_layer_ids": [1]},
        "engram_num_embeddings = [304, 462]: expected one size for each of the 1 Engram layers",
    ),
    ({"engram_max_ngram_size": 1}, "engram_max_ngram_size = 1: expected 2 or more"),
    ({"engram_head_dim": 0}, "engram_head_dim = 0: expected a positive number"),
    (
        {"engram_num_embeddings": [304, 463]},
        "engram_num_embeddings = [304, 463]: expected the sums of the bucket primes",
    ),
    (
        {"engram_num_embeddings": [30, 462]},
        "engram_num_embeddings = [30, 462]: expected at least 240 rows for 6 buckets",
    ),
    ({"engram_compressed_vocab_size": 513}, "engram_compressed_vocab_size = 513: expected at most 512 ids"),
    ({"engram_pad_id": 512}, "engram_pad_id = 512: expected a token id in 0..511"),
    ({"dspark_block_size": 0}, "dspark_block_size = 0: expected a positive number"),
    ({"window_size": 5}, "window_size = 5: expected at least 6, dspark_block_size 5 and the token before"),
    ({"dspark_markov_rank": 0}, "dspark_markov_rank = 0: expected a positive number"),
    ({"dspark_noise_token_id": 512}, "dspark_noise_token_id = 512: expected a token id in 0..511"),
    ({"dspark_target_layer_ids": []}, "dspark_target_layer_ids = []: expected one or more ascending layer numbers"),
    (
        {"dspark_target_layer_ids": [7, 8]},
        "dspark_target_layer_ids = [7, 8]: expected one or more ascending layer numbers",
    ),
    ({"dspark_n_activated_experts": 5}, "dspark_n_activated_experts = 5: expected 0 (as in the backbone) to 4"),
    ({"vision_n_layers": -1}, "vision_n_layers = -1: expected 0 (no vision tower) or a count"),
    ({"vision_patch_size": ABSENT}, "vision_patch_size = 0: expected a positive number"),
    ({"vision_n_heads": 3}, "vision_dim = 64: expected a multiple of 4 x vision_n_heads 3"),
    ({"vision_max_n_token": 3}, "vision_max_n_token = 3: expected at least 4, the positions of the smallest image"),
    ({"vision_max_wh_ratio": 0.5}, "vision_max_wh_ratio = 0.5: expected null or a ratio of 1 or more"),
    ({"image_token_id": ABSENT}, "image_token_id = -1: expected a token id in 0..511"),
    ({"dtype": ABSENT}, "dtype is missing"),
    ({"dtype": "int8"}, 'dtype = "int8": expected fp8 or bf16'),
    ({"expert_dtype": "int4"}, 'expert_dtype = "int4": expected fp4, fp8, bf16, or null'),
    ({"dim": 100}, "dim = 100: expected a multiple of 32, the block of the quantised weights"),
    ({"q_lora_rank": 80}, "q_lora_rank = 80: expected a multiple of 32"),
    ({"o_lora_rank": 48}, "o_lora_rank = 48: expected a multiple of 32"),
    ({"moe_inter_dim": 72}, "moe_inter_dim = 72: expected a multiple of 32"),
    ({"engram_head_dim": 40}, "engram_head_dim = 40: expected a multiple of 32"),
]


@pytest.mark.parametrize(("changes", "message"), BROKEN, ids=[message[:40] for _, message in BROKEN])
def test_inconsistency_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(changed(raw(CASES[0]), changes), "here/config.json")
    assert str(caught.value).startswith(f"here/config.json: {message}")
    assert "\n" not in str(caught.value)


# The same for the nested spelling, whose own names the message uses.
NESTED: list[tuple[dict[str, Any], str]] = [
    ({"text_config.hidden_size": ABSENT}, "text_config.hidden_size is missing"),
    (
        {"text_config.num_hidden_layers": 9},
        "text_config.compress_ratios = [0, 0, 2, 2, 1, 1, 1, 1, 0, 0, 0]: expected 12",
    ),
    ({"text_config.kv_source_layer_ids": [4]}, "text_config.kv_source_layer_ids = [4]: expected a source at or before"),
    ({"text_config.rope_scaling.beta_slow": -1}, "rope_scaling.beta_slow = -1.0: expected a positive number"),
    ({"text_config.rope_scaling.rope_type": "linear"}, 'rope_scaling.rope_type = "linear": expected "yarn"'),
    ({"text_config.rope_scaling": [16]}, "rope_scaling = [16]: expected a JSON object"),
    ({"text_config": 3}, "text_config = 3: expected a JSON object"),
    ({"text_config.num_key_value_heads": 4}, "num_key_value_heads = 4: expected 1"),
    ({"text_config.hidden_act": "gelu"}, 'hidden_act = "gelu": expected "silu"'),
    ({"model_type": "llama"}, 'model_type = "llama": expected "deepseek_v41" or "deepseek_v41_text"'),
    (
        {"quantization_config.weight_block_size": [128, 128]},
        "quantization_config.weight_block_size = [128, 128]: expected",
    ),
    ({"quantization_config.quant_method": "awq"}, 'quantization_config.quant_method = "awq": expected "fp8"'),
    ({"quantization_config.expert_dtype": "fp6"}, 'quantization_config.expert_dtype = "fp6": expected fp4'),
    ({"vision_config.hidden_size": 63}, "vision_config.hidden_size = 63: expected a multiple of 4 x vision_n_heads 4"),
    ({"image_token_id": 900}, "image_token_id = 900: expected a token id in 0..511"),
    ({"text_config.dim": 128}, "text_config.hidden_size = 96 contradicts text_config.dim = 128"),
]


@pytest.mark.parametrize(("changes", "message"), NESTED, ids=[message[:40] for _, message in NESTED])
def test_inconsistency_is_refused_in_its_own_spelling(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(changed(raw(CASES[0], "hf_config.json"), changes), "c")
    assert str(caught.value).startswith(f"c: {message}")


# What a nested file says beside the computation, and a flat one does not: kept as it is.
KEPT = ("attention_dropout", "initializer_range", "use_cache", "max_position_embeddings")
YARN = {"rope_type": "yarn", "factor": 16, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1}
STORED = {"quant_method": "fp8", "weight_block_size": [32, 32], "expert_dtype": "fp4"}

# Two places of a nested file: changes to case_00, and the start of the message, which names both.
CONTRADICTING: list[tuple[dict[str, Any], str]] = [
    ({"vocab_size": 1024}, "text_config.vocab_size = 512 contradicts vocab_size = 1024"),
    ({"hidden_size": 128}, "text_config.hidden_size = 96 contradicts hidden_size = 128"),
    ({"dim": 128}, "text_config.hidden_size = 96 contradicts dim = 128"),
    ({"rope_theta": 5000}, "text_config.rope_theta = 10000.0 contradicts rope_theta = 5000"),
    ({"compress_ratios": [0]}, "text_config.compress_ratios = [0, 0, 2, 2, 1, 1, 1, 1, 0, 0, 0] contradicts"),
    ({"text_config.image_token_id": 7}, "text_config.image_token_id = 7 contradicts image_token_id = 511"),
    ({"text_config.image_token_id": None}, "text_config.image_token_id = null contradicts image_token_id = 511"),
    ({"use_cache": False}, "use_cache = false contradicts text_config.use_cache = true"),
    ({"rope_factor": 8}, "rope_factor = 8 contradicts rope_scaling.factor = 16"),
    ({"original_seq_len": 0}, "original_seq_len = 0 contradicts rope_scaling.original_max_position_embeddings = 64"),
    ({"text_config.beta_fast": 31}, "text_config.beta_fast = 31 contradicts rope_scaling.beta_fast = 32"),
    ({"beta_slow": 2}, "beta_slow = 2 contradicts rope_scaling.beta_slow = 1"),
    ({"vision_dim": 32}, "vision_dim = 32 contradicts vision_config.hidden_size = 64"),
    ({"vision_n_layers": 2, "vision_config": None}, "vision_n_layers = 2 contradicts vision_config = null"),
    ({"expert_dtype": "fp8"}, 'expert_dtype = "fp8" contradicts quantization_config.expert_dtype = "fp4"'),
    (
        {"text_config.expert_dtype": "bf16"},
        'text_config.expert_dtype = "bf16" contradicts quantization_config.expert_dtype = "fp4"',
    ),
    ({"text_config.quantization_config": STORED}, 'quantization_config = {"quant_method": "fp8", "activation_scheme"'),
    ({"dtype": "bf16"}, 'dtype = "bf16" contradicts quantization_config = {'),
    ({"dtype": "fp8", "quantization_config": ABSENT}, 'dtype = "fp8" contradicts no quantization_config'),
    ({"rope_scaling": YARN | {"factor": 8}}, 'rope_scaling = {"rope_type": "yarn", "factor": 8'),
    ({"rope_parameters": YARN | {"factor": 8}}, "rope_scaling.factor = 16 contradicts rope_parameters.factor = 8"),
    (
        {"rope_parameters": {"rope_type": "default"}},
        'rope_scaling.original_max_position_embeddings = 64 contradicts rope_parameters.rope_type = "default"',
    ),
    ({"text_config.rope_scaling": None, "original_seq_len": 64}, "original_seq_len = 64 contradicts rope_scaling ="),
    ({"text_config.rope_scaling.type": "default"}, 'rope_scaling.rope_type = "yarn" contradicts rope_scaling.type ='),
    ({"text_config.rope_scaling": {}}, "rope_scaling.rope_type is missing in rope_scaling = {}"),
    (
        {"text_config.rope_scaling": {"factor": 16}},
        'rope_scaling.rope_type is missing in rope_scaling = {"factor": 16}: expected "yarn", "default", or no table',
    ),
    ({"text_config.rope_scaling.rope_type": None}, "rope_scaling.rope_type is missing in rope_scaling = {"),
    (
        {"text_config.rope_scaling.original_max_position_embeddings": ABSENT},
        "rope_scaling.original_max_position_embeddings = null: expected a length, which YaRN needs",
    ),
    ({"text_config.rope_scaling.factor": ABSENT}, "rope_scaling.factor is missing: rope_scaling.original_max_position"),
    (
        {"text_config.rope_scaling": ABSENT, "rope_parameters": {"main": {"rope_type": "yarn"}, "compress": YARN}},
        'rope_parameters.main.rope_type = "yarn": expected "default"',
    ),
    ({"rope_parameters": {"main": {}}}, "rope_parameters.compress.rope_type is missing in rope_parameters.compress"),
]


@pytest.mark.parametrize(("changes", "message"), CONTRADICTING, ids=[message[:60] for _, message in CONTRADICTING])
def test_two_places_that_disagree_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(changed(raw(CASES[0], "hf_config.json"), changes), "c")
    assert str(caught.value).startswith(f"c: {message}")
    assert "\n" not in str(caught.value)


# The nested spelling's keys in a flat file.
FLAT: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "llama"}, 'model_type = "llama": expected "deepseek_v41"'),
    ({"num_key_value_heads": 4}, "num_key_value_heads = 4: expected 1"),
    ({"hidden_act": "gelu"}, 'hidden_act = "gelu": expected "silu"'),
    ({"attention_bias": True}, "attention_bias = true: expected false"),
    ({"tie_word_embeddings": True}, "tie_word_embeddings = true: expected false"),
    ({"topk_method": "greedy"}, 'topk_method = "greedy": expected "noaux_tc"'),
    ({"rope_scaling": None}, "original_seq_len = 64 contradicts rope_scaling = null"),
    ({"rope_scaling": {"a": 1}}, 'rope_scaling.rope_type is missing in rope_scaling = {"a": 1}'),
    ({"rope_scaling": YARN | {"factor": 8}}, "rope_factor = 16 contradicts rope_scaling.factor = 8"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}, "rope_theta = 10000.0 contradicts"),
    ({"quantization_config": STORED | {"quant_method": "awq"}}, 'quantization_config.quant_method = "awq": expected'),
    ({"quantization_config": STORED | {"expert_dtype": "fp8"}}, 'expert_dtype = "fp4" contradicts quantization_config'),
    ({"quantization_config": None}, 'dtype = "fp8" contradicts quantization_config = null'),
    ({"vision_config": {"hidden_size": 128}}, "vision_dim = 64 contradicts vision_config.hidden_size = 128"),
    ({"vision_config": None}, "vision_n_layers = 2 contradicts vision_config = null"),
    ({"rope_factor": ABSENT}, "rope_factor is missing: original_seq_len = 64 asks for YaRN"),
]


@pytest.mark.parametrize(("changes", "message"), FLAT, ids=[message[:60] for _, message in FLAT])
def test_flat_files_answer_for_nested_keys(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(changed(raw(CASES[0]), changes), "c")
    assert str(caught.value).startswith(f"c: {message}")


def test_saying_the_same_twice_is_fine() -> None:
    flat, nested = raw(CASES[0]), raw(CASES[0], "hf_config.json")
    text = {key: value for key, value in nested["text_config"].items() if key != "model_type"}
    tables = {key: nested[key] for key in ("quantization_config", "vision_config")}
    storage = {key: flat[key] for key in flat if key != "dtype"}
    expected = parse_config(flat)
    for repeated in (text, storage, {"text_config": {**text, **tables}}, {"text_config": {**text, **storage}}):
        assert parse_config(nested | repeated) == expected
    for repeated in (text, tables, {"hidden_size": 96}, {"rope_parameters": YARN}, {"text_config": {}}):
        again = parse_config(flat | repeated)
        assert again == expected
        assert parse_config(again.to_flat()) == expected
    assert parse_config(nested | {"rope_theta": 10000, "eos_token_id": [1]}) == expected


def another(value: Any) -> Any:
    """A value of the same type that says something else."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, list):
        return [*value, 0]
    return "other" if isinstance(value, str) else value + 1


def test_no_key_can_be_said_twice_with_two_meanings() -> None:
    flat, nested = raw(CASES[0]), raw(CASES[0], "hf_config.json")
    text = {key: value for key, value in nested["text_config"].items() if key not in ("rope_scaling", "model_type")}
    unsaid = ("dtype", "gate_temp")  # the nested file gives no such key
    for key, value in (text | {key: flat[key] for key in flat if key not in unsaid}).items():
        with pytest.raises(ConfigError, match=rf"\b{key} = .*(contradicts|: expected)|contradicts .*\b{key} = "):
            parse_config(nested | {key: another(value)})
    repeated = {key: value for key, value in text.items() if key not in flat and key not in KEPT}
    for key, value in repeated.items():
        with pytest.raises(ConfigError, match=rf"contradicts {key} = |\b{key} = .*: expected"):
            parse_config(flat | {key: another(value)})


# One bound per row, as changes to case_00's flat configuration.
OUT_OF_BOUNDS: list[tuple[str, Any, str]] = [
    ("window_size", 2**20 + 1, "at most 1048576"),
    ("index_topk", 2**31, "at most 1048576"),
    ("candidate_topk_blocks", 2**40, "at most 1048576"),
    ("candidate_block_size", 2**62, "at most 1048576"),
    ("candidate_topk_blocks", 2**19, "at most 1048576 in all, with candidate_block_size 4"),
    ("hc_sinkhorn_iters", 1001, "at most 1000"),
    ("hc_mult", 65, "at most 64"),
    ("dspark_block_size", 513, "at most 512"),
    ("dspark_n_routed_experts", 65537, "at most 65536"),
    ("n_routed_experts", 10**6, "at most 65536"),
    ("n_routed_experts", 65536, "at most 262144 experts in all layers, got 524300"),
    ("n_activated_experts", 65537, "at most 65536"),
    ("n_layers", 4097, "at most 4096"),
    ("n_mtp_layers", 65, "at most 64"),
    ("dim", 2**20 + 32, "at most 1048576"),
    ("moe_inter_dim", 2**31, "at most 1048576"),
    ("head_dim", 2**20, "at most 1048576 in all, with head_dim 1048576"),
    ("n_heads", 2**17, "at most 65536"),
    ("compress_ratios", [0, 0, 65537, 65537, 1, 1, 1, 1, 0, 0, 0], "at most 65536"),
    ("max_position_embeddings", 2**31, "at most 2147483647"),
    ("original_seq_len", 2**31, "at most 2147483647"),
    ("engram_vocab_size", 2**31, "at most 2147483647"),
    ("engram_num_embeddings", [304, 2**41], "at most 1099511627776"),
    ("engram_max_ngram_size", 65, "at most 64"),
    ("engram_n_heads", 1025, "at most 1024"),
    ("vision_n_layers", 10**9, "at most 4096"),
    ("vision_max_n_token", 2**31, "at most 1048576"),
    *((name, 1e39, "0 or a magnitude from 1.18e-38 to 3.40e38") for name in ("rope_theta", "swiglu_limit", "norm_eps")),
    *((name, 3.5e38, "0 or a magnitude from") for name in ("route_scale", "gate_temp", "rope_factor", "beta_fast")),
    *((name, 1e-39, "0 or a magnitude from") for name in ("hc_eps", "norm_eps", "beta_slow", "vision_rope_theta")),
    ("gate_temp", float("inf"), "a finite number"),
]


@pytest.mark.parametrize(("name", "value", "expected"), OUT_OF_BOUNDS, ids=[f"{n}={v}" for n, v, _ in OUT_OF_BOUNDS])
def test_what_kernels_cannot_hold_is_refused(name: str, value: Any, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(raw(CASES[0]) | {name: value}, "c")
    assert str(caught.value).startswith("c: ")
    assert f"expected {expected}" in str(caught.value)


def test_too_many_buckets_are_refused_before_any_prime_is_searched() -> None:
    many = {"engram_max_ngram_size": 64, "engram_n_heads": 1024, "engram_num_embeddings": [2**40, 2**40]}
    with pytest.raises(ConfigError, match="engram_n_heads = 1024: expected at most 16384 buckets in all layers"):
        parse_config(raw(CASES[0]) | many)


def test_limits_leave_room_above_the_release() -> None:
    release = read_config(RELEASE)
    for limit, names in LIMITS.items():
        for name in names:
            value = getattr(release, name)
            largest = max(value) if isinstance(value, tuple) else value or 0
            assert 8 * largest <= limit, name


def test_widths_of_bf16_models_are_free() -> None:
    free = {"dim": 100, "q_lora_rank": 50, "o_lora_rank": 9, "moe_inter_dim": 30}
    assert parse_config(changed(raw(CASES[1]), free)).dim == 100
    with pytest.raises(ConfigError, match="moe_inter_dim = 30: expected a multiple of 32"):
        parse_config(changed(raw(CASES[1]), {"moe_inter_dim": 30, "expert_dtype": "fp4"}))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "expected a JSON configuration"),
        (b"{", "expected a JSON configuration"),
        (b"[1]", "expected a JSON object, got list"),
        (b"\xff\xfe{}", "expected a JSON configuration"),
        (b'{"dim": 1, "dim": 2}', "key 'dim' appears twice"),
        (b'{"dim": NaN}', "NaN is not a number"),
        (b'{"dim": 96, "text_config"\n: }', "expected a JSON configuration"),
        (b"[" * 100_000, "expected a JSON configuration"),
    ],
)
def test_files_that_are_no_configuration(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        read_config(tmp_path)
    assert str(caught.value).startswith(str(tmp_path / "config.json"))
    assert "\n" not in str(caught.value)


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected config.json or hf_config.json in this folder, found neither"):
        read_config(tmp_path)
    with pytest.raises(UsageError, match=r"config.json: expected a checkpoint folder or a configuration, found noth"):
        read_config(tmp_path / "config.json")


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(-4, 40) | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=13) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=14,
)


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_no_change_of_one_key_escapes_as_another_error(data: st.DataObject) -> None:
    base = raw(CASES[2], data.draw(st.sampled_from(["config.json", "hf_config.json"])))
    tables = [base, *(value for value in base.values() if isinstance(value, dict))]
    table = data.draw(st.sampled_from(tables))
    table[data.draw(st.sampled_from(sorted(table)))] = data.draw(JSON_VALUES)
    message = ""
    try:
        assert isinstance(parse_config(base, "c"), ModelConfig)
    except ConfigError as error:
        message = str(error)
    assert "\n" not in message


@st.composite
def layer_plans(draw: st.DrawFn) -> dict[str, Any]:
    """Segments of one ratio, each after the first window layers opened by a KV source, with index sources inside."""
    ratios: list[int] = [0] * draw(st.integers(0, 2))
    kv: list[int] = []
    index: list[int] = []
    for ratio in draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)):
        kv.append(len(ratios))
        kinds = ["source", *draw(st.lists(st.sampled_from(["reindex", "reuse", "window"]), max_size=4))]
        for kind in kinds:
            if kind in ("source", "reindex"):
                index.append(len(ratios))
            ratios.append(0 if kind == "window" else ratio)
    plan = {"compress_ratios": ratios, "kv_source_layers": kv, "index_source_layers": index, "n_layers": len(ratios)}
    return raw(CASES[1]) | plan


@given(layer_plans())
@settings(max_examples=100, deadline=None)
def test_every_coherent_plan_is_accepted(flat: dict[str, Any]) -> None:
    config = parse_config(flat)
    for layer in range(config.n_layers):
        source, index = config.kv_source(layer), config.index_source(layer)
        if config.mode(layer) == "window":
            assert source is None
            assert index is None
        else:
            assert source is not None
            assert index is not None
            assert source <= index <= layer
            assert config.mode(source) == "full"
            assert config.ratio(source) == config.ratio(layer)
            assert (config.mode(layer) == "full") == (source == layer)
            assert (config.mode(layer) == "reuse") == (index < layer)
    assert config.n_encoder_layers == max(config.kv_source_layers)
