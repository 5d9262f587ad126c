"""Rows for tests of the prefix store: each depends on all tokens before it, so that a wrong one is seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from v41c.runtime.states import RowKind


@dataclass(frozen=True)
class Rows:
    """Rows of one sequence by state."""

    kinds: Sequence[RowKind]
    arrays: dict[str, np.ndarray]

    @classmethod
    def empty(cls, kinds: Sequence[RowKind], tokens: int) -> Rows:
        """Room for the rows of so many tokens."""
        return cls(kinds, {kind.name: np.zeros((tokens // kind.ratio, *kind.shape), kind.dtype) for kind in kinds})

    def read(self, name: str, begin: int, end: int) -> np.ndarray:
        """As `Device.rows`."""
        rows = self.arrays[name][begin:end]
        assert len(rows) == end - begin, f"{name}: rows {begin} to {end} were asked for"
        return rows

    def put(self, name: str, begin: int, rows: np.ndarray) -> None:
        """As `Device.put_rows`."""
        self.arrays[name][begin : begin + len(rows)] = rows

    def require_equal(self, others: Rows, tokens: int) -> None:
        """AssertionError unless the rows of the first tokens are the same."""
        for kind in self.kinds:
            rows = tokens // kind.ratio
            np.testing.assert_array_equal(self.arrays[kind.name][:rows], others.arrays[kind.name][:rows])


def rows_of(kinds: Sequence[RowKind], tokens: np.ndarray) -> Rows:
    """The rows that a sequence has in these tests."""
    rows = Rows.empty(kinds, len(tokens))
    running = np.cumsum((tokens.astype(np.uint64) + 1) * (np.arange(len(tokens), dtype=np.uint64) * 2654435761 + 97))
    for number, kind in enumerate(kinds):
        closing = running[kind.ratio - 1 :: kind.ratio]
        values = (
            closing[:, None] * np.uint64(number + 3) + np.arange(np.prod(kind.shape, dtype=int)).astype(np.uint64)
        ) >> 3
        array = rows.arrays[kind.name]
        array[...] = (values % 251).reshape(array.shape)
    return rows
