"""What this machine can do at most, measured: reading memory and multiplying f32 matrices. No torch."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from v41c.codegen.workers import processors
from v41c.runtime.artifact import cpu_features

_REPEATS = 5
#: a product of square matrices by numpy's BLAS on every processor, timed in a process of its own: arguments are their
#: rows and how often; prints the best seconds
_PRODUCT = """
import sys, time
import numpy as np
rows, repeats = map(int, sys.argv[1:])
left, right = np.random.default_rng(0).random((2, rows, rows), dtype=np.float32)
took = []
for _ in range(repeats):
    began = time.perf_counter()
    left @ right
    took.append(time.perf_counter() - began)
print(min(took))
"""


@dataclass(frozen=True)
class Machine:
    """Threads that share the work, bytes read per second, and f32 operations per second of a matrix product."""

    threads: int
    read_bytes_per_second: float
    flops_per_second: float


class Limits:
    """Measures the limits again and again, between other work, and keeps the best: a limit is no median."""

    def __init__(self, buffer_bytes: int = 512 << 20, matrix: int = 2048) -> None:
        """`buffer_bytes`: far more than any cache holds. `matrix`: rows and columns of the matrices."""
        values = np.random.default_rng(0).random(buffer_bytes // 4, dtype=np.float32)
        self._parts = np.array_split(values, processors())
        self._matrix = matrix
        self._read_seconds = self._product_seconds = float("inf")

    def sample(self) -> None:
        """Measure both once more."""
        with ThreadPoolExecutor(len(self._parts)) as pool:
            self._read_seconds = min(self._read_seconds, _best_seconds(lambda: list(pool.map(_read, self._parts))))
        self._product_seconds = min(self._product_seconds, *(_product_seconds(self._matrix, k) for k in _kernels()))

    def best(self) -> Machine:
        """The limits so far."""
        size = sum(part.nbytes for part in self._parts)
        return Machine(processors(), size / self._read_seconds, 2 * self._matrix**3 / self._product_seconds)


def _read(part: np.ndarray[tuple[int], np.dtype[np.float32]]) -> float:
    """A dot product with itself: two operations for every four bytes."""
    return float(part @ part)


def _kernels() -> tuple[str, ...]:
    """OpenBLAS kernels to try: its own choice is AVX2 on processors newer than it knows, half of what AVX-512 gives."""
    return ("", "SKYLAKEX") if "avx512f" in cpu_features() else ("",)


def _product_seconds(rows: int, kernels: str) -> float:
    environment = {**os.environ, **({"OPENBLAS_CORETYPE": kernels} if kernels else {})}
    command = [sys.executable, "-c", _PRODUCT, str(rows), str(_REPEATS)]
    return float(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)


def _best_seconds(work: Callable[[], object]) -> float:
    took = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        work()
        took.append(time.perf_counter() - began)
    return min(took)
