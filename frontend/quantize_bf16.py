"""Quantising bf16 weights fast, by table: a power-of-two scale maps the 65536 bf16 numbers to one another.

The tables hold what `v41c.ir.formats` makes of every bf16 number, so that codes and scales are those of
`v41c.frontend.quantize`, bit for bit. Groups are columns here: reductions then run over whole rows of memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from v41c.frontend.quantize import GROUP, Storage
from v41c.ir.formats import FORMATS, encode_e2m1, round_elements, scales

Array = npt.NDArray[Any]
_STRIP = 2**16
"""Elements quantised together: they and what is made of them stay in the cache."""
_LEAST = np.float32(2.0**-63)
"""The least magnitude of a rounding error in the tables: its square is not lost, and exact is told from nearly so."""


@dataclass(frozen=True)
class Fidelity:
    """Sums of squares over a tensor: of its values, and of what quantising changed."""

    signal: float = 0.0
    noise: float = 0.0

    def __add__(self, other: Fidelity) -> Fidelity:
        return Fidelity(self.signal + other.signal, self.noise + other.noise)

    @property
    def snr_db(self) -> float | None:
        """10·log10(signal / noise) in dB; None where nothing changed, as in a tensor of zeros."""
        return 10.0 * math.log10(self.signal / self.noise) if self.noise else None

    @property
    def relative_error(self) -> float:
        """√(noise / signal): relative L2 of the quantised tensor, 0 where nothing changed."""
        return math.sqrt(self.noise / self.signal) if self.noise else 0.0


@dataclass(frozen=True)
class Quantized:
    """Stored elements u8 [N, K] or, two to a byte, [N, K/2]; scale codes u8 as the storage has them."""

    elements: Array
    scale: Array
    fidelity: Fidelity


def quantize_bf16(weight: Array, storage: Storage) -> Quantized:
    """bf16 bits u16 [N, K] in a storage; K a multiple of 32 where rows have scales of their own."""
    parts = [_quantize_strip(strip, storage) for strip in _strips(weight)]
    elements = np.concatenate([part.elements for part in parts])
    scale = np.concatenate([part.scale for part in parts])
    return Quantized(elements, scale, sum((part.fidelity for part in parts), Fidelity()))


def scales_bf16(weight: Array, storage: Storage) -> Array:
    """The scale codes of `quantize_bf16`, alone."""
    strips = (_scales(_groups(strip, storage), storage) for strip in _strips(weight))
    return np.concatenate([_codes(scale, weight.shape[1]) for scale in strips])


def _strips(weight: Array) -> Iterator[Array]:
    """Rows [R, K] of whole blocks."""
    rows, columns = weight.shape
    step = max(1, _STRIP // (GROUP * columns)) * GROUP
    for begin in range(0, rows, step):
        yield weight[begin : begin + step]


def _quantize_strip(strip: Array, storage: Storage) -> Quantized:
    groups = _groups(strip, storage)
    scale = _scales(groups, storage)
    scaled = (groups.astype(np.uint32) << np.uint32(16)).view(np.float32) * (np.float32(1) / scale)
    # exact: a bf16 number again, or too small for more than a zero of its sign
    bits = (scaled.view(np.uint32) >> np.uint32(16)).astype(np.intp)
    codes, errors = _tables(storage.format)
    factors = scale.astype(np.float64) ** 2
    noise = _squares(np.take(errors, bits, mode="clip"), factors)
    # rounding never changes a value by more than itself: the bound holds where squares are too small for f32
    signal = max(_squares(scaled, factors), noise)
    elements = _ungroup(np.take(codes, bits, mode="clip"), strip.shape, storage)
    if FORMATS[storage.format].element_bits == 4:
        elements = elements[:, 0::2] | (elements[:, 1::2] << np.uint8(4))
    return Quantized(elements, _codes(scale, strip.shape[1]), Fidelity(signal, noise))


def _squares(values: Array, factors: Array) -> float:
    """Sum over groups [group, G] of the squares of `values` times `factors` [G], in f64 across groups."""
    np.multiply(values, values, out=values)
    return float(values.sum(0).astype(np.float64) @ factors)


def _groups(strip: Array, storage: Storage) -> Array:
    """Values [group, G], group by group a column; missing rows and columns of blocks are zeros."""
    rows, columns = strip.shape
    if storage.rows == 1:
        return np.ascontiguousarray(strip.reshape(-1, GROUP).T)
    if rows % GROUP or columns % GROUP:
        strip = np.pad(strip, ((0, -rows % GROUP), (0, -columns % GROUP)))
    blocks = strip.reshape(-1, GROUP, strip.shape[1] // GROUP, GROUP)
    return np.ascontiguousarray(blocks.transpose(1, 3, 0, 2)).reshape(GROUP * GROUP, -1)


def _ungroup(groups: Array, shape: tuple[int, ...], storage: Storage) -> Array:
    """Rows [R, K] of values by group."""
    rows, columns = shape
    if storage.rows == 1:
        return np.ascontiguousarray(groups.T).reshape(shape)
    grid = groups.reshape(GROUP, GROUP, -(-rows // GROUP), -1).transpose(2, 0, 3, 1)
    return grid.reshape(-(-rows // GROUP) * GROUP, -1)[:rows, :columns]


def _scales(groups: Array, storage: Storage) -> Array:
    """f32 [G]: magnitudes of bf16 numbers are ordered as their bits."""
    largest = (groups & np.uint16(0x7FFF)).max(0).astype(np.uint32) << np.uint32(16)
    result: Array = scales(torch.from_numpy(largest.view(np.float32))[:, None], FORMATS[storage.format])[:, 0].numpy()
    return result


def _codes(scale: Array, columns: int) -> Array:
    """e8m0 codes u8 [.., ceil(columns/32)] of power-of-two scales: their exponent field."""
    return (scale.view(np.uint32) >> np.uint32(23)).astype(np.uint8).reshape(-1, -(-columns // GROUP))


@cache
def _tables(format: str) -> tuple[Array, Array]:
    """Of every bf16 number by its bits: its code u8, and f32 how far rounding moves it."""
    form = FORMATS[format]
    values = torch.arange(2**16).to(torch.int32).bitwise_left_shift(16).view(torch.float32)
    if form.element_bits == 4:
        codes = encode_e2m1(values)
    else:
        codes = values.clamp(-form.largest, form.largest).to(torch.float8_e4m3fn).view(torch.uint8)
    errors = (round_elements(values, form) - values).abs().numpy()
    return codes.numpy(), np.where(errors == 0, errors, np.maximum(errors, _LEAST))
