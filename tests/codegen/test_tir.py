"""The vocabulary of kernels: number formats over every code and every rounding case, functions by measured error."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from tests.codegen.harness import Array, Library, aligned
from v41c.codegen.cpu import e2m1, layouts, numeric, tir
from v41c.codegen.kernel import CpuKernel
from v41c.targets import x86_64
from v41c.targets.target import CpuTarget

Lanewise = Callable[[tir.Expr], tir.Expr]

FUNCTIONS: dict[str, Lanewise] = {
    "exp": numeric.exp,
    "sigmoid": numeric.sigmoid,
    "silu": numeric.silu,
    "bf16": tir.bf16,
    "round_e4m3": lambda x: numeric.round_e4m3(numeric.clamp(x, 448.0)),
    "encode_e4m3": lambda x: tir.cast(numeric.encode_e4m3(numeric.round_e4m3(numeric.clamp(x, 448.0))), "float32"),
    "decode_e4m3": lambda x: numeric.decode_e4m3(tir.cast(x, "int32")),
    "round_e2m1": lambda x: numeric.round_e2m1(numeric.clamp(x, 6.0)),
    "encode_e2m1": lambda x: tir.cast(numeric.encode_e2m1(numeric.round_e2m1(numeric.clamp(x, 6.0))), "float32"),
    "decode_e8m0": lambda x: numeric.decode_e8m0(tir.cast(x, "int32")),
    "exponent_448": lambda x: tir.cast(numeric.scale_exponent(x, 448.0), "float32"),
    "exponent_6": lambda x: tir.cast(numeric.scale_exponent(x, 6.0), "float32"),
    "unfused": lambda x: tir.product(x, x) - tir.const(1.0, tir.lanes_of(x)),
}


def lanewise(name: str, function: Lanewise) -> CpuKernel:
    """out[i] = function(x[i]), 16 lanes and then one at a time."""
    with tir.function(name, {"x": "float32", "out": "float32"}, ("T",)) as made:
        x, out = made.buffers.values()
        with tir.loop(made.scalars["T"] // 16) as i:
            tir.put(out, i * 16, function(tir.load(x, i * 16)))
        with tir.loop(made.scalars["T"] % 16) as i:
            place = tir.let(made.scalars["T"] // 16 * 16 + i)
            tir.put(out, place, function(tir.load(x, place, 1)))
    return CpuKernel(name, lambda: made.primfunc, ("T",))


KERNELS = {name: lanewise(name, function) for name, function in FUNCTIONS.items()}
TARGETS = [target for target in x86_64.TARGETS if set(target.features) <= set(x86_64.host().features)]


@pytest.fixture(scope="module", params=TARGETS, ids=lambda target: target.name)
def library(request: pytest.FixtureRequest) -> Library:
    """All functions, for every target that this machine runs."""
    target: CpuTarget = request.param
    return Library(list(KERNELS.values()), target)


def apply(library: Library, name: str, values: Array) -> Array:
    x = aligned(values.astype(np.float32))
    out = np.full_like(x, np.nan)
    library.call(KERNELS[name], [x, out], {"T": x.size})
    return out


def same_bits(left: Array, right: Array) -> bool:
    return np.array_equal(left.astype(np.float32).view(np.uint32), right.astype(np.float32).view(np.uint32))


def spread() -> Array:
    """f32 values of every magnitude that matters, every e4m3 and e2m1 midpoint, zeros of both signs."""
    generator = np.random.default_rng(0)
    random = generator.standard_normal(100003) * np.exp2(generator.integers(-20, 12, 100003))
    middles = np.arange(0x3A000000, 0x43E00001, 0x8000, dtype=np.uint32).view(np.float32)
    return np.concatenate([random, middles, -middles, [0.0, -0.0, 448, 464, 1e30, -1e30]]).astype(np.float32)


@pytest.mark.parametrize(("name", "error"), [("exp", 1.2e-7), ("sigmoid", 2e-7), ("silu", 2e-7)])
def test_functions_are_accurate(library: Library, name: str, error: float) -> None:
    x = np.linspace(-87, 88, 100003).astype(np.float32)
    wide = x.astype(np.float64)
    numerator: Array = {"exp": np.exp(wide), "sigmoid": np.ones_like(wide), "silu": wide}[name]
    exact = numerator if name == "exp" else numerator / (1 + np.exp(-wide))
    got = apply(library, name, x)
    assert (np.abs(got - exact) <= error * np.abs(exact)).all()


def test_exp_at_the_ends(library: Library) -> None:
    got = apply(library, "exp", np.array([-np.inf, -200, -104, -100, 0, -0.0, 88.8, np.inf, np.nan]))
    assert got[:3].tolist() == [0, 0, 0]
    assert got[3] == pytest.approx(3.8e-44, rel=0.02)
    assert got[4:8].tolist() == [1, 1, np.inf, np.inf]
    assert np.isnan(got[8])


def test_bf16_rounds_to_even_and_keeps_nan(library: Library) -> None:
    x = spread()
    assert same_bits(apply(library, "bf16", x), x.astype(ml_dtypes.bfloat16))
    special = apply(library, "bf16", np.array([np.nan, -np.nan, np.inf, -np.inf, 3.4e38, 1e-40]))
    assert np.isnan(special[:2]).all()
    assert special[2:5].tolist() == [np.inf, -np.inf, np.inf]
    assert special[5] == pytest.approx(1e-40, rel=2e-3)


def test_e4m3_rounding_and_codes(library: Library) -> None:
    codes = np.clip(spread(), -448, 448).astype(ml_dtypes.float8_e4m3fn)
    assert same_bits(apply(library, "round_e4m3", spread()), codes)
    assert np.array_equal(apply(library, "encode_e4m3", spread()), codes.view(np.uint8))
    every = np.array([code for code in range(256) if code & 0x7F != 0x7F], np.uint8)
    assert same_bits(apply(library, "decode_e4m3", every), every.view(ml_dtypes.float8_e4m3fn))


def test_e2m1_rounding_and_codes(library: Library) -> None:
    codes = np.clip(spread(), -6, 6).astype(ml_dtypes.float4_e2m1fn)
    assert same_bits(apply(library, "round_e2m1", spread()), codes)
    assert np.array_equal(apply(library, "encode_e2m1", spread()), codes.view(np.uint8))


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_e2m1_codes_are_looked_up(target: CpuTarget) -> None:
    """Every code in every lane, of keys, and of weights in each place of a word."""
    with tir.function("keys", {"x": "int32", "out": "float32"}, ("T",)) as keys:
        x, out = keys.buffers.values()
        with tir.loop(keys.scalars["T"]) as i:
            tir.put(out, i * 16, e2m1.decode(tir.let(x[tir.at(i * 16, 16)]), target))
    with tir.function("words", {"x": "uint16", "out": "float32"}, ("T",)) as words:
        x, out = words.buffers.values()
        with tir.loop(words.scalars["T"]) as i:
            for k, column in enumerate(e2m1.decode_words(tir.let(x[tir.at(i * 16, 16)]), target)):
                tir.put(out, i * 64 + k * 16, column)
    kernels = [CpuKernel("keys", lambda: keys.primfunc, ("T",)), CpuKernel("words", lambda: words.primfunc, ("T",))]
    library = Library(kernels, target)
    codes = np.add.outer(np.arange(16), np.arange(16)).astype(np.uint8) % 16
    wanted = codes.view(ml_dtypes.float4_e2m1fn)
    found = aligned(np.full((16, 16), np.nan, np.float32))
    library.call(kernels[0], [aligned(codes.astype(np.int32) + 0x5A30), found], {"T": 16})
    assert same_bits(found, wanted)
    # 16 outputs of 32 k, as an engine stores them
    codes, wanted = np.hstack([codes, codes[::-1]]), np.hstack([wanted, wanted[::-1]])
    layout = "nibbles1" if e2m1.by_bytes(target) else "panels1"
    stored = layouts.pack(layout, codes[:, ::2] | codes[:, 1::2] << 4, "f4e2m1")
    found = aligned(np.full((32, 16), np.nan, np.float32))
    library.call(kernels[1], [aligned(stored), found], {"T": 8})
    assert same_bits(found, wanted.T)


def test_e8m0_codes(library: Library) -> None:
    every = np.arange(255)
    assert same_bits(apply(library, "decode_e8m0", every), np.exp2(every - 127.0))


@pytest.mark.parametrize("limit", [448, 6])
def test_scales_at_exact_powers_of_two(library: Library, limit: int) -> None:
    exact = np.exp2(np.arange(-60.0, 60.0)) * limit
    values = np.concatenate([exact, np.nextafter(exact.astype(np.float32), np.float32(np.inf)), exact * 0.9])
    expected = np.ceil(np.log2(values.astype(np.float32).astype(np.float64) / limit))
    assert np.array_equal(apply(library, f"exponent_{limit}", values), expected)


def test_products_are_rounded_before_they_are_added(library: Library) -> None:
    x = spread()
    x = x[np.abs(x) < 1e15]
    assert same_bits(apply(library, "unfused", x), x * x - np.float32(1))
