"""The memory of sequences: one array per state, a row of it per slot."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from v41c.errors import ContextError
from v41c.manifest import ALIGNMENT_BYTES, Manifest, capacities
from v41c.runtime.bounds import bind, extent_bytes

Array = npt.NDArray[Any]

#: numpy type that holds an IR dtype; bf16 travels as its bits
NUMPY = {"f32": np.float32, "bf16": np.uint16, "i32": np.int32, "i64": np.int64, "bool": np.bool_, "u8": np.uint8}


def aligned_bytes(size: int, what: str) -> npt.NDArray[np.uint8]:
    """Zeros u8 [size] at an address that is a multiple of 64; ContextError when the machine has no such memory.

    Pages are taken from the system when first written, not here.
    """
    try:
        block = np.zeros(size + ALIGNMENT_BYTES, np.uint8)
    except (MemoryError, ValueError) as error:
        raise ContextError(
            f"{what}: {size} bytes cannot be had on this machine: use fewer slots or a shorter context"
        ) from error
    skip = -block.ctypes.data % ALIGNMENT_BYTES
    return block[skip : skip + size]


def as_float(array: Array, dtype: str) -> Array:
    """Values of an array of an IR dtype: bf16 bits become f32, everything else is itself."""
    if dtype != "bf16":
        return array
    return (array.astype(np.uint32) << 16).view(np.float32)


def as_bf16(values: Array) -> Array:
    """The bits u16 of f32 values in bf16, rounded to nearest even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


@dataclass(frozen=True, eq=False)
class States:
    """States of `slots` sequences of up to `max_context` tokens.

    `arrays` by state name, shape with leading dimension S = slots. Nothing in them needs to be cleared between
    sequences: an entry is visible only to tokens of the sequence that wrote it.
    """

    arrays: Mapping[str, Array]
    dims: Mapping[str, int]
    poisoned: bool

    @classmethod
    def allocate(cls, manifest: Manifest, slots: int, max_context: int, *, poison: bool = False) -> States:
        """Memory for every state of an engine; with `poison`, filled with NaN (floats) or 0xFF (everything else)."""
        dims = {"S": slots, **capacities(manifest.dims, max_context)}
        arrays: dict[str, Array] = {}
        for state in manifest.states:
            memory = aligned_bytes(extent_bytes(state, dims), f"state {state.name}")
            arrays[state.name] = memory.view(NUMPY[state.dtype]).reshape(bind(state.shape, dims))
        states = cls(arrays, dims, poison)
        for slot in range(slots):
            states.clear(slot)
        return states

    @property
    def size_bytes(self) -> int:
        """Memory of all slots together."""
        return sum(array.nbytes for array in self.arrays.values())

    def clear(self, slot: int) -> None:
        """Forget a sequence: only poisoned states are written, so that a read of a forgotten entry shows."""
        if not self.poisoned:
            return
        for array in self.arrays.values():
            row = array[slot]
            if row.dtype.kind == "f":
                row.fill(np.nan)
            else:
                row.view(np.uint8).fill(0xFF)


@dataclass(frozen=True)
class RowKind:
    """A global state: a row of `shape` and `dtype` for every `ratio` tokens; it stays with a prefix, others do not."""

    name: str
    ratio: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.dtype.itemsize * math.prod(self.shape)


def row_kinds(manifest: Manifest) -> list[RowKind]:
    """The global states of an engine, those whose rows are counted by a capacity dimension, in the manifest's order."""
    kinds = []
    for state in manifest.states:
        for dim in capacities((str(rows) for rows in state.shape[1:2]), 1):
            shape = bind(state.shape[2:], {})
            kinds.append(RowKind(state.name, int(dim[1:]), np.dtype(NUMPY[state.dtype]), shape))
    return kinds


def bytes_per_token(manifest: Manifest) -> float:
    """What a sequence's states grow by per token."""
    return sum(kind.row_bytes / kind.ratio for kind in row_kinds(manifest))
