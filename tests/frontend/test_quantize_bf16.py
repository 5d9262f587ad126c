"""Quantising bf16 by table: the reference's bits at every edge of its blocks and formats, and what it says it cost."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from v41c.frontend import quantize_bf16 as module
from v41c.frontend.quantize import GROUP, Storage, quantize
from v41c.frontend.quantize_bf16 import Fidelity, quantize_bf16, scales_bf16
from v41c.ir.formats import decode_e2m1, decode_e8m0, unpack_nibbles

BLOCKS, ROWS8, ROWS4 = Storage("fp8_e8m0_32", GROUP), Storage("fp8_e8m0_32", 1), Storage("fp4_e8m0_32", 1)
STORAGES = pytest.mark.parametrize("storage", [BLOCKS, ROWS8, ROWS4], ids=["blocks", "fp8 rows", "fp4 rows"])


def bits_of(weight: torch.Tensor) -> np.ndarray:
    return weight.bfloat16().view(torch.uint16).numpy()


def values_of(elements: np.ndarray, codes: np.ndarray, storage: Storage) -> torch.Tensor:
    """f64 values of stored elements, by the formats' definitions."""
    if storage is ROWS4:
        values = decode_e2m1(unpack_nibbles(torch.from_numpy(elements)))
    else:
        values = torch.from_numpy(elements).view(torch.float8_e4m3fn).float()
    scale = decode_e8m0(torch.from_numpy(codes)).repeat_interleave(storage.rows, 0).repeat_interleave(GROUP, 1)
    return values.double() * scale[: values.shape[0], : values.shape[1]].double()


def check(weight: torch.Tensor, storage: Storage) -> Fidelity:
    """Codes and scales are the reference's, and the fidelity is that of the values they stand for."""
    weight = weight.bfloat16()
    made = quantize_bf16(bits_of(weight), storage)
    elements, scale = quantize(weight.float(), storage)
    np.testing.assert_array_equal(made.elements, elements.view(torch.uint8).numpy())
    np.testing.assert_array_equal(made.scale, scale.view(torch.uint8).numpy())
    np.testing.assert_array_equal(scales_bf16(bits_of(weight), storage), made.scale)
    back = values_of(made.elements, made.scale, storage)
    noise, signal = float(((back - weight.double()) ** 2).sum()), float((weight.double() ** 2).sum())
    assert (made.fidelity.noise == 0) == (noise == 0)
    if noise > 1e-60:  # squares that f32 sums hold, whatever the scale
        # 1024 additions in f32: 2^-14 at most
        assert made.fidelity.noise == pytest.approx(noise, rel=1e-4)
        assert made.fidelity.signal == pytest.approx(signal, rel=1e-4)
        assert made.fidelity.relative_error == pytest.approx(math.sqrt(noise / signal), rel=1e-4)
    return made.fidelity


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_the_reference_bit_for_bit(data: st.DataObject) -> None:
    """Sizes on both sides of a block, magnitudes over the whole of bf16, blocks of very different ones."""
    storage = data.draw(st.sampled_from([BLOCKS, ROWS8, ROWS4]))
    rows = data.draw(st.integers(1, 70))
    columns = data.draw(st.integers(1, 100)) if storage is BLOCKS else 32 * data.draw(st.integers(1, 3))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    spread, center = data.draw(st.sampled_from([0, 2, 20])), data.draw(st.integers(-110, 100))
    exponents = torch.randn(rows, columns, generator=generator) * spread + center
    signs = torch.randn(rows, columns, generator=generator)
    check(signs * torch.exp2(exponents.clamp(-120, 115)), storage)


@STORAGES
@given(st.integers(-126, 120), st.sampled_from([1.0, 448 / 256, 1.5, 1.984375, 1.0078125, 1.7421875, 1.7578125]))
@settings(max_examples=60, deadline=None)
def test_a_constant_block_at_and_beside_powers_of_two(storage: Storage, exponent: int, mantissa: float) -> None:
    """A scale read off a logarithm is off by one at an exact power of two, or where the largest element is met."""
    value = mantissa * 2.0**exponent
    weight = torch.full((33, 64), value)
    weight[::2] *= -1
    check(weight, storage)
    scale = decode_e8m0(torch.from_numpy(scales_bf16(bits_of(weight), storage))).double()
    largest, floor = (6.0, 6.0 * 2.0**-126) if storage is ROWS4 else (448.0, 1e-4)
    assert (scale >= max(value, floor) / largest * (1 - 2**-24)).all()
    assert (scale / 2 < max(value, floor) / largest).all()


@STORAGES
def test_zeros_and_the_ends_of_bf16(storage: Storage) -> None:
    zeros = torch.zeros(40, 64)
    assert check(zeros, storage) == Fidelity()
    zeros[3] = -0.0
    assert check(zeros, storage).snr_db is None
    ends = torch.full((40, 64), torch.finfo(torch.bfloat16).max)
    ends[:, ::3] = torch.finfo(torch.bfloat16).tiny
    ends[:, 1::3] = -1e-40  # subnormal
    check(ends, storage)
    check(torch.full((32, 32), 1e-40), storage)


def test_too_small_for_the_scale_is_lost_and_said() -> None:
    """The scale of fp8 goes no lower than 1e-4 / 448: what is far below it becomes zero."""
    fidelity = check(torch.full((32, 32), 1e-12), BLOCKS)
    assert fidelity.snr_db == 0
    assert fidelity.relative_error == 1
    # where even the squares leave f32's range
    fidelity = quantize_bf16(bits_of(torch.full((32, 32), 1e-35)), BLOCKS).fidelity
    assert fidelity.snr_db == 0


@STORAGES
def test_what_is_stored_is_stored_again_without_loss(storage: Storage) -> None:
    weight = torch.randn(70, 96, generator=torch.Generator().manual_seed(2))
    first = quantize_bf16(bits_of(weight), storage)
    back = values_of(first.elements, first.scale, storage)
    assert first.fidelity.noise > 0
    assert check(back.float(), storage).snr_db is None


@STORAGES
def test_the_ratio_follows_from_the_format_s_steps(storage: Storage) -> None:
    """Rounding errors are uniform over a step: noise is Σ step² / 12, the steps those of each value's magnitude."""
    weight = torch.randn(512, 512, generator=torch.Generator().manual_seed(3)).bfloat16()
    made = quantize_bf16(bits_of(weight), storage)
    scale = decode_e8m0(torch.from_numpy(made.scale)).repeat_interleave(storage.rows, 0).repeat_interleave(GROUP, 1)
    magnitude = (weight.float() / scale).abs().double()
    if storage is ROWS4:
        step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
        band = (18.0, 20.0)
    else:
        step = torch.exp2(magnitude.clamp_min(2.0**-6).log2().floor() - 3)  # three bits of mantissa
        # one binade: values of 1 to 2 with steps of 1/8, so 12 · 64 times 1 to 4
        band = (10 * math.log10(12 * 64), 10 * math.log10(12 * 64 * 4))
    noise = float((step * scale.double()).square().sum() / 12)
    predicted = 10 * math.log10(float(weight.double().square().sum()) / noise)
    assert made.fidelity.snr_db is not None
    assert made.fidelity.snr_db == pytest.approx(predicted, abs=0.2)
    assert band[0] < made.fidelity.snr_db < band[1]


@STORAGES
def test_pieces_make_no_difference(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    bits = bits_of(torch.randn(200, 96, generator=torch.Generator().manual_seed(4)))
    whole = quantize_bf16(bits, storage)
    monkeypatch.setattr(module, "_STRIP", 1)
    parts = quantize_bf16(bits, storage)
    np.testing.assert_array_equal(parts.elements, whole.elements)
    np.testing.assert_array_equal(parts.scale, whole.scale)
    assert parts.fidelity.noise == pytest.approx(whole.fidelity.noise, rel=1e-12)
