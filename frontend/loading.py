"""Filling the eager model from a checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from v41c.frontend.arithmetic import arithmetic_named
from v41c.frontend.checkpoint import Checkpoint
from v41c.frontend.config import ModelConfig, read_config
from v41c.frontend.finite import check_finite
from v41c.frontend.model import Model
from v41c.frontend.moe import Experts
from v41c.frontend.tensor_names import TensorFormats
from v41c.frontend.tokenizer import Tokenizer, compressed_ids
from v41c.ir.formats import dequantize


def load(path: str | Path, arithmetic: str = "release") -> Model:
    """The eager model of a checkpoint folder, weights as stored (mapped, not copied, where they are not stacked).

    In "exact" arithmetic weights are dequantised to f32, Engram tables excepted: they are read row by row. Raises
    ConfigError, CheckpointError or TokenizerError.
    """
    config = read_config(path)
    checkpoint = Checkpoint(path)
    checkpoint.verify(config)
    formats = checkpoint.formats(config)
    table = compressed_ids(Tokenizer(path, config), config) if config.has_engram else None
    pad = int(table[config.engram_pad_id]) if table is not None else 0
    with torch.device("meta"):
        model = Model(config, arithmetic_named(arithmetic), formats, pad)
    for prefix, module in model.named_modules():
        for name, _ in list(module.named_parameters(recurse=False)):
            set_parameter(module, name, read_parameter(checkpoint, model, f"{prefix}.{name}".lstrip(".")))
    if table is not None:
        model.compressed_ids = torch.from_numpy(table)
    if arithmetic == "exact":
        dequantize_parameters(model)
    return model


def skeleton(config: ModelConfig, formats: TensorFormats, arithmetic: str = "release", pad: int = 0) -> Model:
    """The eager model with uninitialised parameters, made under whatever device or fake mode is active."""
    return Model(config, arithmetic_named(arithmetic), formats, pad)


def set_parameter(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Replace a parameter by a tensor of any dtype."""
    module.register_parameter(name, nn.Parameter(tensor, requires_grad=False))


def checkpoint_name(model: Model, parameter: str) -> str:
    """Name in the checkpoint of a parameter; `{}` stands for the expert number of a stack."""
    owner, _, rest = parameter.partition(".experts.")
    if rest and isinstance(model.get_submodule(f"{owner}.experts"), Experts):
        return f"{owner}.experts.{{}}.{rest}"
    return parameter


def read_parameter(checkpoint: Checkpoint, model: Model, parameter: str) -> Tensor:
    """The stored tensor of a parameter, stacked over experts where it is a stack; CheckpointError names a NaN."""
    name = checkpoint_name(model, parameter)
    count = model.get_parameter(parameter).shape[0]
    tensor = checkpoint.stack(name, count) if "{}" in name else checkpoint.tensor(name)
    check_finite(checkpoint, name, tensor)
    return tensor


def dequantize_parameters(model: Model) -> None:
    """Make every weight f32 at its exact value, in place, and drop the scales; Engram tables stay as stored."""
    for prefix, module in model.named_modules():
        if prefix.endswith("engram.embed"):
            continue
        scale = getattr(module, "scale", None)
        for name, tensor in list(module.named_parameters(recurse=False)):
            if name == "weight":
                set_parameter(module, name, dequantize(tensor, scale))
            elif name != "scale":
                set_parameter(module, name, tensor.float())
        if isinstance(scale, nn.Parameter):
            module.scale = None
