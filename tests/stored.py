"""Checkpoints in other storage: weights dequantised to bf16, or bf16 weights quantised and stored, by the reference."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from v41c.frontend.checkpoint import Checkpoint
from v41c.frontend.config import read_config
from v41c.frontend.quantize import quantize, storage_of
from v41c.frontend.quantized_checkpoint import quantized_specs


def write_bf16(source: Path, folder: Path) -> Path:
    """A checkpoint in quantised formats with every such weight at its value in bf16, which holds it exactly."""
    checkpoint = Checkpoint(source)
    tensors = {}
    for name in checkpoint:
        if not name.endswith(".scale"):
            quantized = name.removesuffix("weight") + "scale" in checkpoint
            tensors[name] = checkpoint.dequantized(name).bfloat16() if quantized else checkpoint.tensor(name)
    return _write(source, folder, tensors, {"dtype": "bf16", "expert_dtype": "bf16"})


def write_quantized(source: Path, folder: Path) -> Path:
    """A bf16 checkpoint quantised tensor by tensor and stored in the release's formats."""
    checkpoint, specs = Checkpoint(source), quantized_specs(read_config(source))
    tensors = {}
    for name in checkpoint:
        if name in specs:
            storage = storage_of(name, specs[name].dtype)
            weight, scale = quantize(checkpoint.tensor(name).float(), storage)
            tensors |= {name: weight, name.removesuffix("weight") + "scale": scale}
        else:
            tensors[name] = checkpoint.tensor(name)
    return _write(source, folder, tensors, {"dtype": "fp8", "expert_dtype": "fp4"})


def _write(source: Path, folder: Path, tensors: dict[str, torch.Tensor], formats: dict[str, str]) -> Path:
    folder.mkdir()
    flat = read_config(source).to_flat() | formats
    (folder / "config.json").write_text(json.dumps(flat))
    shutil.copyfile(source / "tokenizer.json", folder / "tokenizer.json")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder
