"""Weights are finite numbers: a NaN in a checkpoint is named before anything computes with it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from v41c.errors import CheckpointError
from v41c.frontend.checkpoint import Checkpoint

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
