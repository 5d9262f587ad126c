"""Random checkpoints in release format: real names, dtypes and scales, activations near unit size in every layer."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from v41c.errors import CheckpointError, UsageError
from v41c.frontend.checkpoint import INDEX_FILE, SINGLE_FILE
from v41c.frontend.config import ModelConfig, parse_config
from v41c.frontend.presets import RELEASE_CONFIG, Preset, build_tokenizer, flat_config, preset_named
from v41c.frontend.quantize import quantize, storage_of
from v41c.frontend.tensor_names import TensorSpec, expected_tensors
from v41c.frontend.tokenizer import TOKENIZER_FILE, Tokenizer, count_compressed_ids

SHARD_BYTES = 64 * 2**20
"""A checkpoint above this is written in shards of about this size, one in memory at a time."""

Progress = Callable[[int, int], None]
"""Called with (bytes written, bytes in all) after every file of weights."""


def initialize(directory: str | Path, preset: str, seed: int = 0, progress: Progress | None = None) -> ModelConfig:
    """Write a random checkpoint of a preset, the same bytes for the same seed, and return its configuration.

    The folder appears complete or not at all. UsageError: unknown preset, a seed below 0, a folder that is not empty.
    CheckpointError: it cannot be written.
    """
    chosen, target = preset_named(preset), Path(directory)
    if seed < 0:
        raise UsageError(f"seed {seed}: expected 0 or more")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"{target}: expected a new or empty folder, found something there")
    if target.resolve() == Path.cwd():
        raise UsageError(f"{target}: expected a folder other than the current one: it is put in place as a whole")
    building: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        building.chmod(0o755)
        with _one_thread():
            config = _write(building, chosen, seed, progress or (lambda done, total: None))
        building.rename(target)
        building = None
    except (OSError, SafetensorError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or " ".join(str(error).split())
        raise CheckpointError(f"{target}: cannot be written: {reason}") from error
    finally:
        if building is not None:
            shutil.rmtree(building, ignore_errors=True)
    return config


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Many small tensors: on a busy machine torch's threads wait for each other far longer than they compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _write(folder: Path, preset: Preset, seed: int, progress: Progress) -> ModelConfig:
    if preset.flat is None:
        text = RELEASE_CONFIG.read_text(encoding="utf-8")
        (folder / "config.json").write_text(text, encoding="utf-8")
        return parse_config(json.loads(text), preset.name)
    (folder / TOKENIZER_FILE).write_text(build_tokenizer(preset.flat["vocab_size"]), encoding="utf-8")
    flat = flat_config(preset, count_compressed_ids(Tokenizer(folder)))
    flat |= {"v41c_preset": preset.name, "v41c_seed": seed}
    config = parse_config(flat, preset.name)
    (folder / "config.json").write_text(json.dumps(flat, indent=1) + "\n", encoding="utf-8")
    write_weights(folder, config, seed, progress)
    return config


def write_weights(folder: Path, config: ModelConfig, seed: int, progress: Progress) -> None:
    """Random weights of a configuration in release format, in one file or in shards; the same for the same seed."""
    specs = expected_tensors(config)
    shards = list(_shards(specs))
    names = [SINGLE_FILE]
    if len(shards) > 1:
        names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    done, total = 0, sum(spec.size_bytes for spec in specs.values())
    for file, shard in zip(names, shards, strict=True):
        save_file(dict(_tensors(shard, specs, seed)), folder / file, metadata={"format": "pt"})
        (folder / file).chmod(0o644)  # the library makes its files private
        done += sum(specs[name].size_bytes for name in shard)
        progress(done, total)
    if len(shards) > 1:
        places = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _shards(specs: dict[str, TensorSpec]) -> Iterator[list[str]]:
    """Names in order, cut before a shard would pass SHARD_BYTES; a weight and its scale stay together."""
    shard: list[str] = []
    size = 0
    for name, spec in specs.items():
        if shard and size + spec.size_bytes > SHARD_BYTES and not name.endswith(".scale"):
            yield shard
            shard, size = [], 0
        shard.append(name)
        size += spec.size_bytes
    yield shard


def _tensors(shard: list[str], specs: dict[str, TensorSpec], seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    for name in shard:
        spec = specs[name]
        if spec.dtype == "F8_E8M0":
            continue  # made with its weight
        if spec.dtype in ("BF16", "F32"):
            dtype = torch.bfloat16 if spec.dtype == "BF16" else torch.float32
            yield name, _values(name, spec.shape, seed).to(dtype)
        else:
            rows, columns = spec.shape
            values = _values(name, (rows, 2 * columns) if spec.dtype == "I8" else spec.shape, seed)
            weight, scale = quantize(values, storage_of(name, spec.dtype))
            yield name, weight
            yield name.removesuffix("weight") + "scale", scale


def _values(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """fp32 values of a tensor: a function of seed and name only, whatever the sharding, threads or machine."""
    generator = np.random.default_rng([seed, int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")])
    mean, deviation = _distribution(name, shape)
    return torch.from_numpy(generator.standard_normal(shape, dtype=np.float32)).mul_(deviation).add_(mean)


def _distribution(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Mean and standard deviation that keep every activation near unit size.

    A projection keeps the variance of its input (K^-1/2); what is added to the residual stream is damped, so that it
    grows slowly with depth; logits spread by about 2, so that a distribution over tokens has a shape.
    """
    keep = 1.0 / math.sqrt(shape[-1])
    kind = name.rsplit(".", 1)[-1]
    if name.endswith("norm.weight"):
        return 1.0, 0.1
    if kind in ("q_weight", "k_weight"):
        return 1.0, 0.2
    if kind in ("hc_attn_scale", "hc_ffn_scale"):
        return 0.8, 0.15
    if kind in ("hc_attn_base", "hc_ffn_base"):
        return 0.0, 0.5
    if kind in ("bias", "bias_vl"):
        return 0.0, 0.15
    if name.endswith(".engram.embed.weight"):
        return 0.0, 0.5
    if kind == "attn_sink" or name.endswith("embed.weight"):
        return 0.0, 1.0
    if name.endswith(("wo_b.weight", "w2.weight")):
        return 0.0, 0.35 * keep
    if name.endswith("head.weight"):
        return 0.0, 2.0 * keep
    return 0.0, keep
