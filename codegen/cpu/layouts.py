"""How weights lie in an engine: panels of 16 outputs, one vector lane per output, ascending along the reduction.

A matrix [M, K] becomes ceil(M / 16) panels, missing outputs filled with zeros:

    `panels`        f32, bf16: [panels, K, 16]
                    f8e4m3:    [panels, K/4, 16] words of four consecutive k, the lowest in the lowest byte
                    f4e2m1:    [panels, K/4, 16] half-words of four consecutive k, the lowest in the lowest nibble
    `row_scales`    e8m0 [M, K/32] of f4e2m1: [panels, K/32, 16]
    `block_scales`  e8m0 [ceil(M/32), K/32] of f8e4m3: [panels, K/32], one scale per panel

Leading axes are stacks of matrices. A suffix `:G` cuts the rows in G equal groups first, each in panels of its own.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from v41c.errors import UnsupportedError

LANES = 16
#: rows and columns that share a scale of an fp8 weight; columns that share one of an fp4 weight
SCALE_BLOCK = 32

Array = NDArray[Any]


def panels(rows: int) -> int:
    """Panels of a matrix with so many outputs."""
    return -(-rows // LANES)


def packed_bytes(layout: str, shape: tuple[int, ...], dtype: str) -> int:
    """Bytes of a packed tensor of an IR dtype; `shape` counts elements, as tensor types do."""
    name, groups = _parse(layout)
    *stack, rows, columns = shape
    count = math.prod(stack) * groups
    rows //= groups
    if name == "panels":
        return count * panels(rows) * LANES * columns * _BITS[dtype] // 8
    if name == "row_scales":
        return count * panels(rows) * LANES * columns
    return count * 2 * rows * columns


def pack(layout: str, array: Array, dtype: str) -> Array:
    """`array` in a layout, as bytes' worth of the unsigned type the kernels read.

    `array` holds the elements of the IR dtype: f32, bf16 as two bytes, f8e4m3 and e8m0 as one byte, f4e2m1 as bytes of
    two along the last axis. UnsupportedError names a shape the layout cannot hold.
    """
    name, groups = _parse(layout)
    if groups > 1:
        array = array.reshape(*array.shape[:-2], groups, -1, array.shape[-1])
    if name == "row_scales":
        return _panels(_raw(array, np.uint8)).swapaxes(-1, -2).copy()
    if name == "block_scales":
        return np.repeat(_raw(array, np.uint8), 2, axis=-2)
    if dtype in ("f32", "bf16"):
        return _panels(_raw(array, np.uint32 if dtype == "f32" else np.uint16)).swapaxes(-1, -2).copy()
    # four fp8 are a word, four fp4 a half-word: both are one element here
    word = np.dtype(np.uint32 if dtype == "f8e4m3" else np.uint16)
    codes = np.ascontiguousarray(_raw(array, np.uint8))
    if codes.shape[-1] * 8 % (SCALE_BLOCK * _BITS[dtype]):
        columns = codes.shape[-1] * 8 // _BITS[dtype]
        raise UnsupportedError(
            f"layout {layout} of {dtype}: columns: expected a multiple of {SCALE_BLOCK}, got {columns}"
        )
    return _panels(codes.view(word)).swapaxes(-1, -2).copy()


_BITS = {"f32": 32, "bf16": 16, "f8e4m3": 8, "f4e2m1": 4, "e8m0": 8}


def _parse(layout: str) -> tuple[str, int]:
    name, _, groups = layout.partition(":")
    if name not in ("panels", "row_scales", "block_scales"):
        raise UnsupportedError(f"layout: expected panels, row_scales or block_scales, got {layout}")
    return name, int(groups or 1)


def _raw(array: Array, kind: Any) -> Array:
    return array.view(kind) if array.dtype.itemsize == np.dtype(kind).itemsize else array.astype(kind)


def _panels(array: Array) -> Array:
    """[..., M, K] as [..., panels, 16, K], zeros for the missing outputs."""
    *stack, rows, columns = array.shape
    missing = panels(rows) * LANES - rows
    if missing:
        array = np.concatenate([array, np.zeros((*stack, missing, columns), array.dtype)], axis=-2)
    return array.reshape(*stack, panels(rows), LANES, columns)
