"""The two spellings of a configuration (flat inference keys, nested Hugging Face keys), brought to one set of names."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import msgspec

from v41c.errors import ConfigError

# flat name -> name inside text_config; a name that is not listed is spelled alike in both.
_TEXT = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_mtp_layers": "num_nextn_predict_layers",
    "n_heads": "num_attention_heads",
    "rope_head_dim": "qk_rope_head_dim",
    "window_size": "sliding_window",
    "kv_source_layers": "kv_source_layer_ids",
    "index_source_layers": "index_source_layer_ids",
    "candidate_source_layer": "candidate_source_layer_id",
    "n_activated_experts": "num_experts_per_tok",
    "moe_inter_dim": "moe_intermediate_size",
    "score_func": "scoring_func",
    "route_scale": "routed_scaling_factor",
    "norm_eps": "rms_norm_eps",
    "engram_pad_id": "engram_pad_token_id",
    "dspark_n_activated_experts": "dspark_num_experts_per_tok",
    "bos_id": "bos_token_id",
    "eos_ids": "eos_token_id",
    "pad_id": "pad_token_id",
}

# flat name -> name inside vision_config
_VISION = {
    "vision_n_layers": "num_hidden_layers",
    "vision_dim": "hidden_size",
    "vision_n_heads": "num_attention_heads",
    "vision_inter_dim": "intermediate_size",
    "vision_patch_size": "patch_size",
    "vision_downsample_ratio": "downsample_ratio",
    "vision_max_n_token": "max_image_tokens",
    "vision_min_pixels": "min_pixels",
    "vision_rope_theta": "rope_theta",
    "vision_max_wh_ratio": "max_wh_ratio",
}

# flat name -> name inside rope_scaling or rope_parameters
_ROPE = {
    "rope_factor": "factor",
    "original_seq_len": "original_max_position_embeddings",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
}

# Keys of the nested spelling whose other values would be another architecture.
_FIXED: dict[str, tuple[Any, ...]] = {
    "model_type": ("deepseek_v41", "deepseek_v41_text"),
    "num_key_value_heads": (1,),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "tie_word_embeddings": (False,),
    "topk_method": ("noaux_tc",),
}
_QUANTIZATION: dict[str, tuple[Any, ...]] = {
    "quant_method": ("fp8",),
    "activation_scheme": ("dynamic",),
    "weight_block_size": ([32, 32],),
    "scale_fmt": ("ue8m0",),
}

_MEANING: dict[Any, str] = {
    int: "an integer",
    int | None: "an integer or null",
    float: "a number",
    float | None: "a number or null",
    bool: "true or false",
    str: "a string",
    tuple[int, ...]: "a list of integers",
}


def shown(value: Any) -> str:
    """A value as error messages print it: one line, as the file would spell it, cut when it is long."""
    text = json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)
    return text if len(text) <= 120 else f"{text[:100]}... ({len(text)} characters)"


@dataclasses.dataclass
class Spelled:
    """A configuration under its flat names.

    `names` gives the spelling a user would recognise for each flat name, `extra` what this version does not know.
    """

    values: dict[str, Any]
    names: dict[str, str]
    extra: dict[str, Any]


def unify(raw: Mapping[str, Any], types: Mapping[str, Any], where: str) -> Spelled:
    """The values that `raw`, in either spelling, gives for the names in `types`; ConfigError for a contradiction."""
    nested = "text_config" in raw or "hidden_size" in raw
    if not nested and "dim" not in raw:
        keys = shown(sorted(raw)[:5])
        raise ConfigError(f"{where}: expected a model configuration (dim, or text_config), got the keys {keys}")
    reader = _Reader(where, types)
    if nested:
        _read_nested(reader, raw)
    else:
        _read_flat(reader, raw)
    if not reader.values.get("original_seq_len"):
        for name in _ROPE:  # without YaRN these say nothing; dropped so that both spellings compare equal
            reader.values.pop(name, None)
    return Spelled(reader.values, reader.names, reader.extra)


def _read_flat(reader: _Reader, raw: Mapping[str, Any]) -> None:
    source = dict(raw)
    for name in reader.types:
        reader.take(source, name, (name, _TEXT.get(name, name)), "")
    reader.values["expert_dtype"] = reader.values.get("expert_dtype") or reader.values.get("dtype")
    reader.extra.update(source)


def _read_nested(reader: _Reader, raw: Mapping[str, Any]) -> None:
    parts = ("text_config", "vision_config", "quantization_config", "rope_scaling", "rope_parameters")
    top = {key: value for key, value in raw.items() if key not in parts}
    inner = reader.table(raw, "text_config")
    text = top | inner
    text.pop("dtype", None)  # says bfloat16 whatever the weights are
    vision = reader.table(raw, "vision_config")
    both = {**raw, **inner}
    for key, allowed in _FIXED.items():
        for table in (top, inner):
            reader.fixed(table, key, key, allowed)
    prefix = "text_config." if "text_config" in raw else ""
    elsewhere = {"dtype", "expert_dtype", *_VISION, *_ROPE}
    for name in (name for name in reader.types if name not in elsewhere):
        hf = _TEXT.get(name, name)
        reader.take(text, name, (hf, name), "" if hf in top and hf not in inner else prefix)
    for name, hf in _VISION.items():
        reader.take(vision, name, (hf,), "vision_config.")
    _read_rope(reader, both)
    _read_storage(reader, both, text)
    for key in parts:
        text.pop(key, None)
    reader.extra.update(text)
    if vision:
        reader.extra["vision_config"] = vision


def _read_rope(reader: _Reader, both: Mapping[str, Any]) -> None:
    """`rope_scaling` or the newer `rope_parameters`: one table, or one for window and one for compressed layers."""
    key = "rope_parameters" if both.get("rope_parameters") is not None else "rope_scaling"
    table = reader.table(both, key)
    main, compress = table, table
    if "main" in table or "compress" in table:
        main, compress = reader.table(table, "main"), reader.table(table, "compress")
        reader.take(compress, "compress_rope_theta", ("rope_theta",), f"{key}.")
    if "rope_theta" in main:
        reader.take(main, "rope_theta", ("rope_theta",), f"{key}.")
    kind = compress.get("rope_type", compress.get("type", "default"))
    for name, hf in _ROPE.items():
        reader.names[name] = f"{key}.{hf}"
    if kind == "yarn":
        for name, hf in _ROPE.items():
            reader.take(compress, name, (hf,), f"{key}.")
    elif kind != "default":
        raise ConfigError(f'{reader.where}: {key}.rope_type = {shown(kind)}: expected "yarn" or "default"')


def _read_storage(reader: _Reader, both: Mapping[str, Any], text: dict[str, Any]) -> None:
    quantization = reader.table(both, "quantization_config")
    reader.names["dtype"] = "quantization_config"
    reader.values["dtype"] = "fp8" if quantization else "bf16"
    for key, allowed in _QUANTIZATION.items():
        reader.fixed(quantization, key, f"quantization_config.{key}", allowed)
    source = quantization if "expert_dtype" in quantization else text
    reader.take(source, "expert_dtype", ("expert_dtype",), "quantization_config.")
    text.pop("expert_dtype", None)
    reader.values["expert_dtype"] = reader.values.get("expert_dtype") or reader.values["dtype"]


class _Reader:
    """Collects values under flat names, and refuses a value of another type or two different values for one name."""

    def __init__(self, where: str, types: Mapping[str, Any]) -> None:
        self.where = where
        self.types = types
        self.values: dict[str, Any] = {}
        self.names: dict[str, str] = {}
        self.extra: dict[str, Any] = {}

    def table(self, source: Mapping[str, Any], key: str) -> dict[str, Any]:
        """A copy of the JSON object at `key`; empty when it is absent or null."""
        value = source.get(key)
        if value is not None and not isinstance(value, dict):
            raise ConfigError(f"{self.where}: {key} = {shown(value)}: expected a JSON object")
        return dict(value or {})

    def fixed(self, source: Mapping[str, Any], key: str, name: str, allowed: tuple[Any, ...]) -> None:
        """Refuse a present key whose value is not among those this architecture has."""
        if source.get(key) is not None and source[key] not in allowed:
            expected = " or ".join(shown(value) for value in allowed)
            raise ConfigError(f"{self.where}: {name} = {shown(source[key])}: expected {expected}")

    def take(self, source: dict[str, Any], name: str, keys: tuple[str, ...], prefix: str) -> None:
        """Move the value that `source` has under one of `keys` to `name`, typed; all that are present must agree."""
        present = [key for key in dict.fromkeys(keys) if key in source]
        self.names.setdefault(name, prefix + (present or keys)[0])
        values = [source.pop(key) for key in present]
        if not values:
            return
        self.names[name] = prefix + present[0]
        if any(value != values[0] for value in values):
            first, second = (
                f"{prefix}{key} = {shown(value)}" for key, value in list(zip(present, values, strict=True))[:2]
            )
            raise ConfigError(f"{self.where}: {first} contradicts {second}")
        if values[0] is None:  # an absent feature, spelled out
            return
        value = self._typed(name, values[0])
        if self.values.setdefault(name, value) != value:
            raise ConfigError(
                f"{self.where}: {self.names[name]} = {value!r} contradicts {self.values[name]!r} elsewhere"
            )

    def _typed(self, name: str, value: Any) -> Any:
        kind = self.types[name]
        if name == "eos_ids" and isinstance(value, int):
            value = [value]
        try:
            return msgspec.convert(value, kind)
        except msgspec.ValidationError:
            raise ConfigError(f"{self.where}: {self.names[name]} = {shown(value)}: expected {_MEANING[kind]}") from None
