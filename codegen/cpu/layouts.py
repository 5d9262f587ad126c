"""How weights lie in an engine: panels of 16 outputs, one vector lane per output, ascending along the reduction.

A matrix [M, K] becomes P = ceil(M / 16) panels, missing outputs filled with zeros; panels come in strips of S, so that
a task reads one stretch of memory from end to end (the last strip may be narrower, the others are [.., S, ..]):

    `panelsS`        f32, bf16: [P / S, K, S, 16]
                     f8e4m3:    [P / S, K/4, S, 16] words of four consecutive k, the lowest in the lowest byte
                     f4e2m1:    [P / S, K/4, S, 16] half-words of four consecutive k, the lowest in the lowest nibble
    `nibblesS`       f4e2m1 for byte shuffles: [P / S, K/4, S, 32] bytes of two k (`_NIBBLES`)
    `row_scalesS`    e8m0 [M, K/32] of f4e2m1: [P / S, K/32, S, 16]
    `block_scalesS`  e8m0 [ceil(M/32), K/32] of f8e4m3: [P / S, K/32, S], one scale per panel

Leading axes are stacks of matrices. A suffix `:G` cuts the rows in G equal groups first, a stack of their own.
"""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from v41c.errors import UnsupportedError

LANES = 16
#: rows and columns that share a scale of an fp8 weight; columns that share one of an fp4 weight
SCALE_BLOCK = 32
#: byte `at` of `nibblesS` has two k of one output, k in the low nibble and k + 2 in the high one, so that the parts of
#: what they stand for, interleaved twice within halves of 128 bits, come out as 16 outputs of k, then of k + 1
_NIBBLES = [(at % 16 // 8, at % 8 // 4 * 8 + at // 16 * 4 + at % 4) for at in range(32)]

Array = NDArray[Any]


def panels(rows: int) -> int:
    """Panels of a matrix with so many outputs."""
    return -(-rows // LANES)


def packed_bytes(layout: str, shape: tuple[int, ...], dtype: str) -> int:
    """Bytes of a packed tensor of an IR dtype; `shape` counts elements, as tensor types do."""
    name, _, groups = _parse(layout)
    *stack, rows, columns = shape
    matrices = math.prod(stack) * groups
    rows //= groups
    if name in ("panels", "nibbles"):
        return matrices * panels(rows) * LANES * columns * _BITS[dtype] // 8
    return matrices * columns * (panels(rows) * LANES if name == "row_scales" else 2 * rows)


def pack(layout: str, array: Array, dtype: str) -> Array:
    """`array` in a layout: [stack, elements] of the unsigned type that the kernels read.

    `array` holds the elements of the IR dtype: f32, bf16 as two bytes, f8e4m3 and e8m0 as one byte, f4e2m1 as bytes of
    two along the last axis. UnsupportedError names a shape the layout cannot hold.
    """
    name, strip, groups = _parse(layout)
    matrices = array.reshape(-1, array.shape[-2] // groups, array.shape[-1])
    if name == "block_scales":
        return _strips(np.repeat(_raw(matrices, np.uint8), 2, axis=1)[..., None], strip)
    if name == "row_scales":
        return _strips(_panels(_raw(matrices, np.uint8)), strip)
    if dtype in ("f32", "bf16"):
        return _strips(_panels(_raw(matrices, np.uint32 if dtype == "f32" else np.uint16)), strip)
    # four fp8 are a word, four fp4 a half-word: either is one element here
    word = np.dtype(np.uint32 if dtype == "f8e4m3" else np.uint16)
    columns = matrices.shape[-1] * 8 // _BITS[dtype]
    if columns % SCALE_BLOCK:
        raise UnsupportedError(
            f"layout {layout} of {dtype}: columns: expected a multiple of {SCALE_BLOCK}, got {columns}"
        )
    words = _panels(np.ascontiguousarray(_raw(matrices, np.uint8)).view(word))
    return _strips(words if name == "panels" else _interleaved(words), strip)


_BITS = {"f32": 32, "bf16": 16, "f8e4m3": 8, "f4e2m1": 4, "e8m0": 8}


_LAYOUT = re.compile(r"(panels|nibbles|row_scales|block_scales)([1-9][0-9]*)(?::([1-9][0-9]*))?")


def _parse(layout: str) -> tuple[str, int, int]:
    """Name, panels of a strip, groups."""
    found = _LAYOUT.fullmatch(layout)
    if found is None:
        raise UnsupportedError(
            f"layout: expected panelsS, nibblesS, row_scalesS or block_scalesS, S a number, got {layout}"
        )
    name, strip, groups = found.groups()
    return name, int(strip), int(groups or 1)


def _interleaved(words: Array) -> Array:
    """Half-words of four k [.., 16] as `nibblesS` has them, two bytes in each."""
    low, high = (
        np.stack([words[..., output] >> (4 * (k + more)) & 0xF for k, output in _NIBBLES], axis=-1) for more in (0, 2)
    )
    made: Array = (low | high << 4).astype(np.uint8)
    return made.view(np.uint16)


def _raw(array: Array, kind: Any) -> Array:
    return array.view(kind) if array.dtype.itemsize == np.dtype(kind).itemsize else array.astype(kind)


def _panels(array: Array) -> Array:
    """[stack, M, K] as [stack, panels, K, 16], zeros for the missing outputs."""
    stack, rows, columns = array.shape
    missing = panels(rows) * LANES - rows
    if missing:
        array = np.concatenate([array, np.zeros((stack, missing, columns), array.dtype)], axis=1)
    return array.reshape(stack, panels(rows), LANES, columns).swapaxes(2, 3)


def _strips(array: Array, strip: int) -> Array:
    """[stack, panels, depth, lanes] as [stack, elements] in strips [depth, strip, lanes]."""
    stack, count, depth, lanes = array.shape
    out = np.empty((stack, count * depth * lanes), array.dtype)
    whole = count // strip * strip
    split = whole * depth * lanes
    head = array[:, :whole].reshape(stack, -1, strip, depth, lanes)
    out[:, :split].reshape(stack, -1, depth, strip, lanes)[...] = head.swapaxes(2, 3)
    out[:, split:].reshape(stack, depth, count - whole, lanes)[...] = array[:, whole:].swapaxes(1, 2)
    return out
