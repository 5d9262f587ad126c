"""Engram hashing constants (DeepSeek-V4.1 report, Engram): multipliers, bucket primes, offsets, as exact integers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from v41c.frontend.config import ModelConfig

# Deterministic Miller-Rabin below 3.3e24 (Sorenson and Webster, arXiv:1509.00986): more than any 64-bit modulus.
_WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)


def is_prime(number: int) -> bool:
    """Whether `number` (below 2^64) is prime, without error."""
    if number < 2:
        return False
    for witness in _WITNESSES:
        if number % witness == 0:
            return number == witness
    odd, twos = number - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for witness in _WITNESSES:
        power = pow(witness, odd, number)
        if power in (1, number - 1):
            continue
        for _ in range(twos - 1):
            power = power * power % number
            if power == number - 1:
                break
        else:
            return False
    return True


def _primes_from(start: int) -> Iterator[int]:
    return filter(is_prime, itertools.count(start))


def bucket_primes(layers: int, orders: int, heads: int, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Bucket sizes per layer, in (n-gram size 2..N, head) order; `orders` = N - 1.

    Walking layers, sizes and heads, each bucket takes the next prime >= `vocab_size` not handed out before.
    """
    primes = _primes_from(vocab_size)
    return tuple(tuple(itertools.islice(primes, orders * heads)) for _ in range(layers))


def primes(config: ModelConfig) -> dict[int, tuple[int, ...]]:
    """Bucket sizes [(N-1)*heads] by Engram layer id."""
    layers = config.engram_layer_ids
    sizes = bucket_primes(
        len(layers), config.engram_max_ngram_size - 1, config.engram_n_heads, config.engram_vocab_size
    )
    return dict(zip(layers, sizes, strict=True))


def offsets(config: ModelConfig) -> dict[int, tuple[int, ...]]:
    """First table row [(N-1)*heads] of each bucket by Engram layer id: the buckets lie end to end."""
    return {layer: tuple(itertools.accumulate(sizes[:-1], initial=0)) for layer, sizes in primes(config).items()}


def multipliers(layer: int, config: ModelConfig) -> tuple[int, ...]:
    """The odd multipliers [N] of layer `layer` (its number in the model), one per look-back distance 0..N-1."""
    limit = max(1, (2**63 - 1) // config.engram_compressed_vocab_size // 2)
    generator = np.random.default_rng(10007 * layer)
    drawn = generator.integers(0, limit, size=config.engram_max_ngram_size, dtype=np.int64)
    return tuple(2 * int(value) + 1 for value in drawn)
