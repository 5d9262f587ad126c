"""Engram constants: primes, offsets and multipliers as exact integers, held against known hashes."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from v41c.frontend.config import ModelConfig, read_config
from v41c.frontend.engram import bucket_primes, is_prime, multipliers, offsets, primes
from v41c.frontend.tokenizer import Tokenizer, compressed_ids

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "data" / "golden"
TRAINED = ROOT / "v41c" / "data" / "tiny-v41"
RELEASE = ROOT / "v41c" / "data" / "release"


def test_release_constants() -> None:
    config = read_config(RELEASE)
    units = load_file(GOLDEN / "units.safetensors")
    assert multipliers(1, config) == (76632096046245, 4839876093313, 35959672319349, 73987337458391)
    assert multipliers(14, config) == (67716810739261, 51510806800915, 30921347202721, 82619226485591)
    for index, layer in enumerate((1, 14)):
        assert list(primes(config)[layer]) == units["release.engram.primes"][index].ravel().tolist()
        assert list(offsets(config)[layer]) == units["release.engram.offsets"][index].ravel().tolist()
    assert [sum(sizes) for sizes in primes(config).values()] == [384006168, 384016682]


def test_release_primes_are_quick() -> None:
    config = read_config(RELEASE)
    started = time.process_time()
    primes(config)
    assert time.process_time() - started < 1.0


def test_known_primes_and_multipliers() -> None:
    units = load_file(GOLDEN / "units.safetensors")
    found = bucket_primes(layers=2, orders=3, heads=2, vocab_size=61)
    assert [list(sizes) for sizes in found] == units["engram.primes"].reshape(2, 6).tolist()
    config = read_config(GOLDEN / "case_00")  # layers 1 and 3, the same compressed vocabulary
    assert [list(multipliers(layer, config)) for layer in (1, 3)] == units["engram.multipliers"].tolist()


@pytest.mark.parametrize("name", ["case_00", "case_04"])
def test_buckets_fill_the_table(name: str) -> None:
    config = read_config(GOLDEN / name)
    for layer, rows in zip(config.engram_layer_ids, config.engram_num_embeddings, strict=True):
        starts, sizes = offsets(config)[layer], primes(config)[layer]
        assert starts[0] == 0
        assert all(start + size == end for start, size, end in zip(starts, sizes, (*starts[1:], rows), strict=True))


def hash_rows(ids: list[int], config: ModelConfig) -> np.ndarray:
    """Table rows [tokens, layers, columns] of compressed ids, in Python integers, straight from the definition."""
    rows = []
    for position in range(len(ids)):
        window = [ids[position - back] if back <= position else config.engram_pad_id for back in range(4)]
        for layer in config.engram_layer_ids:
            factors, sizes, starts = multipliers(layer, config), primes(config)[layer], offsets(config)[layer]
            mixed = window[0] * factors[0]
            for order in range(1, config.engram_max_ngram_size):
                mixed ^= window[order] * factors[order]
                columns = range((order - 1) * config.engram_n_heads, order * config.engram_n_heads)
                rows.append([mixed % sizes[column] + starts[column] for column in columns])
    return np.array(rows).reshape(len(ids), len(config.engram_layer_ids), config.engram_columns)


@pytest.mark.parametrize("name", ["case_00", "case_04"])
def test_rows_equal_golden_rows(name: str) -> None:
    folder = GOLDEN / name
    config = read_config(folder)
    table = compressed_ids(Tokenizer(folder, config), config)
    golden = load_file(folder / "io.safetensors")
    for run in ("r0", "r1", "r2", "r3"):
        expected = golden[f"{run}.p.engram_hash"]
        for ids, rows in zip(golden[f"{run}.ids"], expected, strict=True):
            assert np.array_equal(hash_rows(table[ids[: len(rows)].numpy()].tolist(), config), rows.numpy())


def test_rows_equal_golden_rows_of_the_trained_model() -> None:
    config = read_config(TRAINED)
    table = compressed_ids(Tokenizer(TRAINED, config), config)
    for name in ("prompt5", "prompt40"):
        golden = load_file(GOLDEN / "tiny-v41-golden" / f"{name}.safetensors")
        rows = golden["engram_ids"].numpy()
        ids = torch.cat([golden["input_ids"], golden["greedy_ids"]])[: len(rows)].numpy()
        assert np.array_equal(hash_rows(table[ids].tolist(), config), rows)


def test_primes_below_a_thousand() -> None:
    sieve = [number for number in range(2, 1000) if all(number % divisor for divisor in range(2, number))]
    assert [number for number in range(-3, 1000) if is_prime(number)] == sieve


@given(st.integers(2, 10**7))
def test_primality_equals_trial_division(number: int) -> None:
    divisor = next((d for d in range(2, int(number**0.5) + 1) if number % d == 0), None)
    assert is_prime(number) == (divisor is None)


@pytest.mark.parametrize("number", [561, 3215031751, 3825123056546413051, 318665857834031151167461 - 2])
def test_strong_pseudoprimes_are_composite(number: int) -> None:
    assert not is_prime(number)


def test_largest_64_bit_prime() -> None:
    assert is_prime(2**64 - 59)
    assert not any(is_prime(2**64 - distance) for distance in range(1, 59))
