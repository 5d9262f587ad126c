"""Weights of a graph from a checkpoint, as numpy arrays: stored bytes, or f32 where the graph declares f32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from v41c.frontend.checkpoint import Checkpoint
from v41c.frontend.finite import check_finite
from v41c.frontend.trace import COMPRESSED_IDS
from v41c.ir.formats import dequantize
from v41c.ir.graph import Value
from v41c.ir.torch_types import type_of
from v41c.ir.types import DType

Array = npt.NDArray[Any]
#: numpy dtypes that hold the bytes of torch dtypes that numpy lacks
_BYTES = {1: np.uint8, 2: np.uint16}


def tensor_reader(checkpoint: Checkpoint, compressed_ids: Array | None) -> Callable[[Value], torch.Tensor]:
    """Gives the tensor of a weight value; a stack over experts for a name with `{}`.

    CheckpointError names the first NaN or infinity: decoders of kernels read such codes as ordinary numbers.
    """

    def stored(name: str, count: int, source: Checkpoint = checkpoint) -> torch.Tensor:
        tensor = source.stack(name, count) if "{}" in name else source.tensor(name)
        check_finite(source, name, tensor)
        return tensor

    def read(value: Value) -> torch.Tensor:
        if value.name == COMPRESSED_IDS:
            return torch.from_numpy(compressed_ids)
        count = int(value.type.shape[0])
        if value.type.dtype == DType.BF16:  # of a weight that is quantised on the way, what it was
            return stored(value.name, count, checkpoint.original)
        tensor = stored(value.name, count)
        if value.type.dtype != DType.F32 or type_of(tensor).dtype == DType.F32:
            return tensor
        scale = value.name.removesuffix("weight") + "scale"
        present = scale.replace("{}", "0") in checkpoint
        return dequantize(tensor, stored(scale, count) if present else None)

    return read


def piece_reader(checkpoint: Checkpoint, compressed_ids: Array | None) -> Callable[[Value], Iterator[Array]]:
    """The same as `array_reader`, as consecutive parts of the leading axis: a table need not fit into memory."""
    read = array_reader(checkpoint, compressed_ids)

    def pieces(value: Value) -> Iterator[Array]:
        if value.name not in checkpoint or value.type.dtype in (DType.F32, DType.BF16):
            yield read(value)
            return
        for piece in checkpoint.pieces(value.name):
            check_finite(checkpoint, value.name, piece)
            yield as_numpy(piece)

    return pieces


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
