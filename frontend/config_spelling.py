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

# Keys of either spelling whose other values would be another architecture.
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

_PARTS = ("text_config", "vision_config", "quantization_config", "rope_scaling", "rope_parameters")

# What a file and its text_config say about themselves: they may differ, and nothing is computed from them.
_DESCRIPTIVE = ("model_type", "architectures", "transformers_version", "dtype", "torch_dtype", "_name_or_path")

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
    """The values that `raw`, in either spelling, gives for the names in `types`; ConfigError for a contradiction.

    A file may say a thing twice, in one spelling or in both, as long as it says the same.
    """
    stated = bool(raw.get("text_config"))
    nested = stated or ("dim" not in raw and "hidden_size" in raw)
    if not nested and "dim" not in raw:
        keys = shown(sorted(raw)[:5])
        raise ConfigError(f"{where}: expected a model configuration (dim, or text_config), got the keys {keys}")
    reader = _Reader(where, types)
    top, inner = dict(raw), reader.table(raw, "text_config")
    both = reader.parts(top, inner)
    for table in (inner, top):
        for key, allowed in _FIXED.items():
            reader.fixed(table, key, key, allowed)
    if nested:
        _read_nested(reader, top, inner, "text_config." if stated else "")
    else:
        _read_flat(reader, top)
    _read_vision(reader, both)
    _read_rope(reader, both)
    _read_storage(reader, both, nested)
    for key in sorted(inner.keys() & top.keys() - set(_DESCRIPTIVE)):
        reader.equal(key, top[key], f"text_config.{key}", inner[key])
    reader.extra = top | inner | reader.extra
    return Spelled(reader.values, reader.names, reader.extra)


def _read_flat(reader: _Reader, top: dict[str, Any]) -> None:
    for name in reader.types:
        reader.take(top, name, (name, _TEXT.get(name, name)), "")


def _read_nested(reader: _Reader, top: dict[str, Any], inner: dict[str, Any], prefix: str) -> None:
    for name in reader.types:
        reader.names[name] = f"{prefix}{_TEXT.get(name, name)}"
    reader.names |= {name: f"vision_config.{hf}" for name, hf in _VISION.items()}
    reader.names |= {name: f"rope_scaling.{hf}" for name, hf in _ROPE.items()}
    for source, path in ((inner, "text_config."), (top, "")):
        # Names the storage type of the plain tensors, bfloat16 whatever the weights are, unless in the flat words.
        if source.get("dtype") not in ("fp8", "bf16"):
            source.pop("dtype", None)
        for name in reader.types:
            reader.take(source, name, (_TEXT.get(name, name), name), path)


def _read_vision(reader: _Reader, both: Mapping[str, Any]) -> None:
    vision = reader.table(both, "vision_config")
    for name, hf in _VISION.items():
        reader.take(vision, name, (hf,), "vision_config.")
    if "vision_config" in both and both["vision_config"] is None and reader.values.get("vision_n_layers"):
        raise ConfigError(f"{reader.where}: {reader.said('vision_n_layers')} contradicts vision_config = null")
    if vision:
        reader.extra["vision_config"] = vision


def _read_rope(reader: _Reader, both: Mapping[str, Any]) -> None:
    """`rope_scaling` and the newer `rope_parameters`: one table, or one for window and one for compressed layers."""
    off = "rope_scaling = null" if "rope_scaling" in both and both["rope_scaling"] is None else ""
    for key in ("rope_scaling", "rope_parameters"):
        if both.get(key) is not None:
            off = _read_rope_table(reader, reader.table(both, key), key) or off
    length = reader.values.get("original_seq_len")
    if length and off:
        raise ConfigError(f"{reader.where}: {reader.said('original_seq_len')} contradicts {off}")
    if length and "rope_factor" not in reader.values:
        said = reader.said("original_seq_len")
        raise ConfigError(f"{reader.where}: {reader.names['rope_factor']} is missing: {said} asks for YaRN")
    if not length:
        for name in _ROPE:  # without YaRN these say nothing; dropped so that both spellings compare equal
            reader.values.pop(name, None)


def _read_rope_table(reader: _Reader, table: dict[str, Any], key: str) -> str:
    """Take one table's numbers; returns what it says where it turns YaRN off, else nothing."""
    main, compress, path = table, table, key
    if "main" in table or "compress" in table:
        main, compress, path = reader.table(table, "main"), reader.table(table, "compress"), f"{key}.compress"
        for name in ("rope_type", "type"):
            reader.fixed(main, name, f"{key}.main.{name}", ("default",))
        reader.take(main, "rope_theta", ("rope_theta",), f"{key}.main.")
        reader.take(compress, "compress_rope_theta", ("rope_theta",), f"{path}.")
    else:
        reader.take(main, "rope_theta", ("rope_theta",), f"{key}.")
    kinds = {name: compress[name] for name in ("rope_type", "type") if compress.get(name) is not None}
    if not kinds:
        expected = 'expected "yarn", "default", or no table where there is no YaRN'
        raise ConfigError(f"{reader.where}: {path}.rope_type is missing in {path} = {shown(compress)}: {expected}")
    for name in kinds:
        reader.fixed(kinds, name, f"{path}.{name}", ("yarn", "default"))
    first, kind = next(iter(kinds.items()))
    if kinds.get("type", kind) != kind:
        reader.equal(f"{path}.rope_type", kind, f"{path}.type", kinds["type"])
    if kind == "default":
        return f"{path}.{first} = {shown(kind)}"
    for name, hf in _ROPE.items():
        reader.take(compress, name, (hf,), f"{path}.")
    if not reader.values.get("original_seq_len"):
        value = shown(reader.values.get("original_seq_len"))
        length = f"{path}.original_max_position_embeddings"
        raise ConfigError(f"{reader.where}: {length} = {value}: expected a length, which YaRN needs")
    return ""


def _read_storage(reader: _Reader, both: Mapping[str, Any], nested: bool) -> None:
    quantization = reader.table(both, "quantization_config")
    for key, allowed in _QUANTIZATION.items():
        reader.fixed(quantization, key, f"quantization_config.{key}", allowed)
    if nested or "quantization_config" in both:
        stated = "quantization_config" in both
        path = "quantization_config" if stated else "no quantization_config"
        dense = "fp8" if quantization else "bf16"
        known = reader.values.setdefault("dtype", dense)
        if known != dense:
            told = f"{path} = {shown(both['quantization_config'])}" if stated else path
            raise ConfigError(f"{reader.where}: {reader.said('dtype')} contradicts {told}")
        if nested:
            reader.names["dtype"] = "quantization_config"
    reader.take(quantization, "expert_dtype", ("expert_dtype",), "quantization_config.")
    reader.values["expert_dtype"] = reader.values.get("expert_dtype") or reader.values.get("dtype")


class _Reader:
    """Collects values under flat names, and refuses a value of another type or two different values for one name."""

    def __init__(self, where: str, types: Mapping[str, Any]) -> None:
        self.where = where
        self.types = types
        self.values: dict[str, Any] = {}
        self.names: dict[str, str] = {}
        self.extra: dict[str, Any] = {}
        self._given: dict[str, tuple[str, Any, Any]] = {}

    def table(self, source: Mapping[str, Any], key: str) -> dict[str, Any]:
        """A copy of the JSON object at `key`; empty when it is absent or null."""
        value = source.get(key)
        if value is not None and not isinstance(value, dict):
            raise ConfigError(f"{self.where}: {key} = {shown(value)}: expected a JSON object")
        return dict(value or {})

    def parts(self, top: dict[str, Any], inner: dict[str, Any]) -> dict[str, Any]:
        """Move the tables that a configuration consists of out of the file and its text_config, where both agree."""
        found: dict[str, Any] = {}
        for key in _PARTS:
            if key in top and key in inner:
                self.equal(key, top[key], f"text_config.{key}", inner[key])
            for table in (top, inner):
                if key in table:
                    found[key] = table.pop(key)
        return found

    def fixed(self, source: Mapping[str, Any], key: str, name: str, allowed: tuple[Any, ...]) -> None:
        """Refuse a present key whose value is not among those this architecture has."""
        if source.get(key) is not None and source[key] not in allowed:
            expected = " or ".join(shown(value) for value in allowed)
            raise ConfigError(f"{self.where}: {name} = {shown(source[key])}: expected {expected}")

    def equal(self, name: str, value: Any, other: str, second: Any) -> None:
        """Refuse two places of the file that say different things about one key."""
        if value != second:
            raise ConfigError(f"{self.where}: {name} = {shown(value)} contradicts {other} = {shown(second)}")

    def said(self, name: str) -> str:
        """Where the file gives a flat name, and what it says there."""
        path, raw, _ = self._given[name]
        return f"{path} = {shown(raw)}"

    def take(self, source: dict[str, Any], name: str, keys: tuple[str, ...], prefix: str) -> None:
        """Move the values that `source` has under `keys` to `name`, typed; whatever else was said must agree."""
        self.names.setdefault(name, prefix + keys[0])
        for key in dict.fromkeys(keys):
            if key in source:
                self._give(name, prefix + key, source.pop(key))

    def _give(self, name: str, path: str, raw: Any) -> None:
        value = None if raw is None else self._typed(name, path, raw)
        if name not in self._given:
            self._given[name] = path, raw, value
            self.names[name] = path
            if value is not None:  # null is an absent feature, spelled out
                self.values[name] = value
        elif self._given[name][2] != value:
            raise ConfigError(f"{self.where}: {self.said(name)} contradicts {path} = {shown(raw)}")

    def _typed(self, name: str, path: str, value: Any) -> Any:
        kind = self.types[name]
        if name == "eos_ids" and isinstance(value, int):
            value = [value]
        try:
            return msgspec.convert(value, kind)
        except msgspec.ValidationError:
            raise ConfigError(f"{self.where}: {path} = {shown(value)}: expected {_MEANING[kind]}") from None
