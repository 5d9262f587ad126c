"""What this machine can do at most, measured: reading memory and multiplying f32 matrices. No torch."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

#: what is read: far more than any cache holds
_BUFFER_BYTES = 512 << 20
_MATRIX = 2048
_REPEATS = 7


@dataclass(frozen=True)
class Machine:
    """Threads that share the work, bytes read per second, and f32 operations per second of a matrix product."""

    threads: int
    read_bytes_per_second: float
    flops_per_second: float


def threads() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0))


def measure(buffer_bytes: int = _BUFFER_BYTES, matrix: int = _MATRIX) -> Machine:
    """The best of several runs of each: a limit, so not a median."""
    return Machine(threads(), _read_bytes_per_second(buffer_bytes), _flops_per_second(matrix))


def _read_bytes_per_second(size: int) -> float:
    """A dot product of a buffer with itself, split over the processors: two operations for four bytes."""
    buffer = np.random.default_rng(0).random(size // 4, dtype=np.float32)
    parts = np.array_split(buffer, threads())
    with ThreadPoolExecutor(len(parts)) as pool:
        return buffer.nbytes / _best_seconds(lambda: list(pool.map(lambda part: float(part @ part), parts)))


def _flops_per_second(size: int) -> float:
    """A product of square matrices by the BLAS of numpy, which uses every processor."""
    left, right = np.random.default_rng(0).random((2, size, size), dtype=np.float32)
    return 2 * size**3 / _best_seconds(lambda: left @ right)


def _best_seconds(work: Callable[[], object]) -> float:
    took = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        work()
        took.append(time.perf_counter() - began)
    return min(took)
