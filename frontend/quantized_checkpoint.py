"""A bf16 checkpoint as it would be stored in the release's formats, quantised tensor by tensor as they are read."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from v41c.frontend.checkpoint import Checkpoint
from v41c.frontend.config import ModelConfig
from v41c.frontend.config_rules import check_config
from v41c.frontend.finite import check_finite
from v41c.frontend.quantize import GROUP, storage_of
from v41c.frontend.quantize_bf16 import Fidelity, quantize_bf16, scales_bf16
from v41c.frontend.tensor_names import TensorFormats, TensorSpec, expected_tensors
from v41c.ir.types import DType, TensorType

_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_PIECE = 2**24
"""Elements of a table that are quantised and handed on together."""
_STORED = {"F8_E4M3": torch.float8_e4m3fn, "I8": torch.int8}
_DTYPES = {"F8_E4M3": DType.F8E4M3, "I8": DType.F4E2M1, "F8_E8M0": DType.E8M0}


def quantized_config(config: ModelConfig) -> ModelConfig:
    """The configuration with the release's formats where it has bf16: fp8 dense weights, fp4 routed experts.

    ConfigError names a width that the blocks of these formats do not divide.
    """
    expert = "fp4" if config.expert_dtype == "bf16" else config.expert_dtype
    chosen = dataclasses.replace(config, dtype="fp8", expert_dtype=expert)
    check_config(chosen, {field.name: field.name for field in dataclasses.fields(config)}, "--passes +quantize")
    return chosen


def quantized_specs(config: ModelConfig) -> dict[str, TensorSpec]:
    """Quantised tensors and scales of a model in the release's formats, by name in the checkpoint.

    What an fp8 model may store either way (`TensorFormats`) is not among them: it is in a release format as it is.
    """
    open_ones: Literal["fp8", "bf16"] = "fp8" if config.dtype == "bf16" else "bf16"
    specs = expected_tensors(quantized_config(config), TensorFormats(open_ones, open_ones))
    return {name: spec for name, spec in specs.items() if spec.dtype in _DTYPES}


def quantized_types(config: ModelConfig) -> dict[str, TensorType]:
    """The same as graphs name and type them: experts as one stack, `{}` in place of their number."""
    types: dict[str, TensorType] = {}
    for name, spec in quantized_specs(config).items():
        *rows, columns = spec.shape
        shape = (*rows, 2 * columns if spec.dtype == "I8" else columns)
        expert = _EXPERT.search(name)
        if expert:  # ascending: the last one tells how many there are
            name = _EXPERT.sub(".experts.{}.", name)
            shape = (int(expert[1]) + 1, *shape)
        types[name] = TensorType(_DTYPES[spec.dtype], shape)
    return types


class QuantizedCheckpoint(Checkpoint):
    """Tensors as `v41c.frontend.quantize` would store them; what is in a quantised format already is read as it is.

    `fidelity` has, of every weight that was quantised so far, what that did to it.
    """

    def __init__(self, path: str | Path, config: ModelConfig) -> None:
        super().__init__(path)
        self._original = Checkpoint(path)
        self.fidelity: dict[str, Fidelity] = {}
        specs = quantized_specs(config)
        self._made = {
            name
            for name, spec in specs.items()
            if spec.dtype in _STORED and name in self._specs and self._specs[name].dtype == "BF16"
        }
        for name in self._made:
            scale = _scale_of(name)
            self._specs |= {name: specs[name], scale: specs[scale]}
            self._files[scale] = self._files[name]

    @property
    def original(self) -> Checkpoint:
        """The checkpoint as its files have it."""
        return self._original

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor in the release's formats; CheckpointError names the first NaN or infinity of what it is made of."""
        weight = name.removesuffix("scale") + "weight" if name.endswith(".scale") else name
        if weight not in self._made:
            return self._original.tensor(name)
        if weight != name:
            codes = scales_bf16(self._bits(weight), storage_of(weight, self._specs[weight].dtype))
            return torch.from_numpy(codes).view(torch.float8_e8m0fnu)
        self.fidelity.pop(name, None)
        return self._quantize(name, self._bits(name))

    def pieces(self, name: str) -> Iterator[torch.Tensor]:
        """A tensor as consecutive rows, a bounded number of them at a time where they are made."""
        if name not in self._made:
            yield self.tensor(name)
            return
        bits = self._bits(name)
        rows = max(1, _PIECE // (GROUP * bits.shape[1])) * GROUP
        self.fidelity.pop(name, None)
        for begin in range(0, len(bits), rows):
            yield self._quantize(name, bits[begin : begin + rows])

    def _bits(self, name: str) -> npt.NDArray[Any]:
        """The stored bf16 numbers, mapped."""
        tensor = self._original.tensor(name)
        check_finite(self, name, tensor)
        bits: npt.NDArray[np.uint16] = tensor.view(torch.uint16).numpy()
        return bits

    def _quantize(self, name: str, bits: npt.NDArray[Any]) -> torch.Tensor:
        dtype = self._specs[name].dtype
        made = quantize_bf16(bits, storage_of(name, dtype))
        self.fidelity[name] = self.fidelity.get(name, Fidelity()) + made.fidelity
        return torch.from_numpy(made.elements).view(_STORED[dtype])


def _scale_of(weight: str) -> str:
    return weight.removesuffix("weight") + "scale"
