"""Weights of a graph from a checkpoint, as numpy arrays: stored bytes, or f32 where the graph declares f32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from v41c.frontend.checkpoint import Checkpoint
from v41c.frontend.trace import COMPRESSED_IDS
from v41c.ir.formats import dequantize
from v41c.ir.graph import Value
from v41c.ir.torch_types import type_of
from v41c.ir.types import DType

Array = npt.NDArray[Any]
#: numpy dtypes that hold the bytes of torch dtypes that numpy lacks
_BYTES = {1: np.uint8, 2: np.uint16}


def tensor_reader(checkpoint: Checkpoint, compressed_ids: Array | None) -> Callable[[Value], torch.Tensor]:
    """Gives the tensor of a weight value; a stack over experts for a name with `{}`."""

    def stored(name: str, count: int) -> torch.Tensor:
        return checkpoint.stack(name, count) if "{}" in name else checkpoint.tensor(name)

    def read(value: Value) -> torch.Tensor:
        if value.name == COMPRESSED_IDS:
            return torch.from_numpy(compressed_ids)
        count = int(value.type.shape[0])
        tensor = stored(value.name, count)
        if value.type.dtype != DType.F32 or type_of(tensor).dtype == DType.F32:
            return tensor
        scale = value.name.removesuffix("weight") + "scale"
        present = scale.replace("{}", "0") in checkpoint
        return dequantize(tensor, stored(scale, count) if present else None)

    return read


def array_reader(checkpoint: Checkpoint, compressed_ids: Array | None) -> Callable[[Value], Array]:
    """`tensor_reader`, as numpy."""
    read = tensor_reader(checkpoint, compressed_ids)
    return lambda value: as_numpy(read(value))


def as_numpy(tensor: torch.Tensor) -> Array:
    """The tensor's bytes as numpy: bf16 as u16, one-byte formats as u8, the rest as they are."""
    if tensor.dtype in (torch.float32, torch.int32, torch.int64):
        return tensor.numpy()
    size = tensor.element_size()
    return tensor.contiguous().view(torch.uint8).numpy().view(_BYTES[size]).reshape(*tensor.shape)
