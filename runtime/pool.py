"""The short-lived state of sequences that have ended, kept in memory: their next turn needs no replay.

Global rows lie in the prefix store. Here is what it leaves out: window rings, open groups, the Engram's history, the
draft head's rings, and the global rows behind the last whole group of all ratios.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from v41c.errors import UsageError
from v41c.runtime.session import Standing
from v41c.runtime.states import Array
from v41c.runtime.steps import Ints

DEFAULT_LIMIT_BYTES = 1 << 30
DEFAULT_SECONDS_TO_LIVE = 600.0


@dataclass(frozen=True, eq=False)
class Local:
    """What a sequence of tokens i32 [N] needs to go on, beside its first global rows.

    states: all rows of every short-lived state, by name. tail: the global rows that no prefix has, by name.
    """

    tokens: Ints
    standing: Standing
    states: Mapping[str, Array]
    tail: Mapping[str, Array]

    @property
    def size_bytes(self) -> int:
        """Memory that it takes."""
        arrays = (self.tokens, *self.states.values(), *self.tail.values())
        return sum(array.nbytes for array in arrays)


class Pool:
    """Local state by token ids, within a size and a time to live. A full pool forgets what was used longest ago."""

    def __init__(
        self,
        *,
        limit_bytes: int = DEFAULT_LIMIT_BYTES,
        seconds_to_live: float = DEFAULT_SECONDS_TO_LIVE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """seconds_to_live: since the last use, by `clock`. UsageError for a negative size or time."""
        for name, value in (("pool bytes", limit_bytes), ("pool seconds", seconds_to_live)):
            if value < 0:
                raise UsageError(f"{name}: expected 0 or more, got {value}")
        self._limit_bytes = limit_bytes
        self._seconds_to_live = seconds_to_live
        self._clock = clock
        # by token ids, what was used last at the end, with the time of that
        self._kept: dict[bytes, tuple[float, Local]] = {}

    @property
    def size_bytes(self) -> int:
        """Memory that all of it takes."""
        return sum(local.size_bytes for _, local in self._kept.values())

    def __len__(self) -> int:
        """Sequences that are still there."""
        self._expire()
        return len(self._kept)

    def put(self, local: Local) -> None:
        """Keep the state of a sequence, in place of any other with the same tokens."""
        self._use(local)
        self._expire()
        while self.size_bytes > self._limit_bytes:
            del self._kept[next(iter(self._kept))]

    def find(self, tokens: Ints) -> Local | None:
        """The longest sequence whose tokens all are among the first of a prompt i32 [N] that goes on behind them."""
        self._expire()
        begun = [local for _, local in self._kept.values() if _begins(tokens, local.tokens)]
        found = max(begun, key=lambda local: len(local.tokens), default=None)
        if found is not None:
            self._use(found)
        return found

    def _use(self, local: Local) -> None:
        key = local.tokens.tobytes()
        self._kept.pop(key, None)
        self._kept[key] = (self._clock(), local)

    def _expire(self) -> None:
        now = self._clock()
        self._kept = {
            key: (used, local) for key, (used, local) in self._kept.items() if now - used <= self._seconds_to_live
        }


def _begins(tokens: Ints, first: Ints) -> bool:
    return len(first) < len(tokens) and np.array_equal(tokens[: len(first)], first)
