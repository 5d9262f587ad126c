"""Weights of a graph from a checkpoint, as numpy arrays: stored bytes, or f32 where the graph declares f32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from v41c.errors import CheckpointError
from v41c.frontend.checkpoint import Checkpoint
from v41c.frontend.trace import COMPRESSED_IDS
from v41c.ir.formats import dequantize
from v41c.ir.graph import Value
from v41c.ir.torch_types import type_of
from v41c.ir.types import DType

Array = npt.NDArray[Any]
#: numpy dtypes that hold the bytes of torch dtypes that numpy lacks
_BYTES = {1: np.uint8, 2: np.uint16}


#: dtype -> integers of its bits, the bits but the sign, and the least of them that is no finite number
_NOT_FINITE: dict[torch.dtype, tuple[type[np.unsignedinteger[Any]], int, int]] = {
    torch.float8_e4m3fn: (np.uint8, 0x7F, 0x7F),
    torch.float8_e8m0fnu: (np.uint8, 0xFF, 0xFF),
    torch.bfloat16: (np.uint16, 0x7FFF, 0x7F80),
    torch.float32: (np.uint32, 0x7FFFFFFF, 0x7F800000),
}
_PIECE = 2**20
"""Elements looked at together: they stay in the cache between the two passes over them."""


def first_not_finite(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Index of the first NaN or infinity of a contiguous tensor; None where all is finite, as packed fp4 always is."""
    if tensor.dtype not in _NOT_FINITE or not tensor.numel():
        return None
    integers, mask, least = _NOT_FINITE[tensor.dtype]
    bits = tensor.reshape(-1).view(torch.uint8).numpy().view(integers)
    for start in range(0, bits.size, _PIECE):
        magnitudes = bits[start : start + _PIECE] & integers(mask)
        if magnitudes.max() >= least:
            place = start + int(np.argmax(magnitudes >= least))
            return tuple(int(index) for index in np.unravel_index(place, tuple(tensor.shape)))
    return None


def check_finite(checkpoint: Checkpoint, name: str, tensor: torch.Tensor) -> None:
    """CheckpointError names the first NaN or infinity of a tensor, or of a stack over experts (`{}` in its name)."""
    place = first_not_finite(tensor)
    if place is None:
        return
    value = tensor[place].float().item()
    if "{}" in name:
        expert, *rest = place
        name, place = name.format(expert), tuple(rest)
    where = f"{checkpoint.file(name)}: {name}[{', '.join(map(str, place))}]"
    raise CheckpointError(f"{where}: expected finite numbers, found {value}")


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
