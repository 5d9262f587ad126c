"""How long steps take on this machine: measured once, and kept beside the engine in `<engine>.profile.json`."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import statistics
import time
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from v41c.manifest import MANIFEST_FILE

if TYPE_CHECKING:
    from v41c.runtime.artifact import Engine
    from v41c.runtime.session import Session

Tokens = npt.NDArray[np.int32]

#: rounds in which everything is timed once: at least, at most, and when the seconds are over; a first one warms up
_LEAST_ROUNDS, _MOST_ROUNDS, _SECONDS = 2, 9, 1.2


class Profile(msgspec.Struct, frozen=True):
    """Median seconds of steps.

    engine: SHA-256 of its manifest. machine: what it ran on. batches: numbers of sequences, ascending from 1; for each:
    plain: a token of every sequence, without the draft head's context. draft: a block of drafts for every sequence.
    verify: 1 + k tokens of every sequence, and taking them back, by k from 0, as far as a step has room.
    """

    engine: str
    machine: str
    batches: list[int]
    plain_seconds: list[float]
    draft_seconds: list[float]
    verify_seconds: list[list[float]]

    def plain(self, sequences: int) -> float:
        """As `Times.plain`."""
        return self._between(sequences, self.plain_seconds)

    def draft(self, sequences: int) -> float:
        """As `Times.draft`."""
        return self._between(sequences, self.draft_seconds)

    def verify(self, sequences: int, tokens: int) -> float:
        """As `Times.verify`: interpolated between tokens per sequence as between numbers of sequences."""
        mean = tokens / sequences
        return self._between(sequences, [_at(mean, range(1, len(row) + 1), row) for row in self.verify_seconds])

    def _between(self, sequences: int, seconds: list[float]) -> float:
        return _at(sequences, self.batches, seconds)

    def is_of(self, engine: str, machine: str, slots: int, block: int) -> bool:
        """Whether it holds for an engine on a machine, for so many sequences and drafts, and is not damaged."""
        count = len(self.batches)
        rows = [self.plain_seconds, self.draft_seconds, *self.verify_seconds]
        return (
            (self.engine, self.machine) == (engine, machine)
            and self.batches == sorted({*self.batches, 1})
            and self.batches[-1] >= slots
            and [len(self.plain_seconds), len(self.draft_seconds), len(self.verify_seconds)] == [count] * 3
            and all(1 <= len(row) <= 1 + block for row in self.verify_seconds)
            and all(math.isfinite(value) and value > 0 for row in rows for value in row)
        )


def _at(place: float, places: range | list[int], values: list[float]) -> float:
    """Linear interpolation; beyond the last place, in proportion to it."""
    return float(np.interp(place, places, values)) * max(1.0, place / places[-1])


def known_profile(session: Session) -> Profile | None:
    """The profile beside the session's engine, or else measured in the session and, if possible, put there.

    None where it is not there and the session is not empty, or too short to measure in.
    """
    engine, block = session.engine, session.engine.manifest.draft_block
    most = min(session.slots, session.room.tokens, session.room.rows)
    digest = hashlib.sha256((engine.path / MANIFEST_FILE).read_bytes()).hexdigest()
    path = profile_path(engine)
    with contextlib.suppress(OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        found = msgspec.json.decode(path.read_bytes(), type=Profile)
        if found.is_of(digest, session.hardware, most, block):
            return found
    context = min(2 * engine.manifest.window, session.max_context - block - 2)
    if context < 1 or not session.empty:
        return None
    profile = _Measurement(session, context, most).profile(digest)
    with contextlib.suppress(OSError):
        _write(path, msgspec.json.format(msgspec.json.encode(profile)))
    return profile


def profile_path(engine: Engine) -> Path:
    """Where an engine's profile is kept: beside its folder, which admits no other files."""
    folder = Path(os.path.abspath(engine.path))
    return folder.with_name(f"{folder.name}.profile.json")


def some_tokens(engine: Engine, count: int) -> Tokens:
    """Random ordinary tokens, always the same, i32 [count]: every expert, Engram row and cache line gets its turn."""
    manifest = engine.manifest
    named = [manifest.config.get(name) for name in ("image_token_id", "pad_token_id", "engram_pad_id")]
    special = {manifest.bos_token, *manifest.eos_tokens, manifest.draft_noise_token, *named}
    ordinary = [token for token in range(manifest.vocabulary) if token not in special]
    return np.random.default_rng(0).choice(np.array(ordinary, np.int32), count)


class _Measurement:
    """Times steps of up to `most` sequences in an empty session, which it leaves empty.

    `context`: tokens that sequences have meanwhile.
    """

    def __init__(self, session: Session, context: int, most: int) -> None:
        self._session = session
        self._context, self._most = context, most
        self._block = session.engine.manifest.draft_block
        self._tokens: list[int] = some_tokens(session.engine, max(4096, context)).tolist()
        self._taken = 0

    def profile(self, engine: str) -> Profile:
        batches = sorted({*(1 << power for power in range(self._most.bit_length())), self._most})
        samples: dict[tuple[str, int, int], list[float]] = {}
        following, began = self._session.drafting, time.perf_counter()
        for number in range(1 + _MOST_ROUNDS):
            for key, seconds in self._round(batches):
                samples.setdefault(key, [])
                if number:
                    samples[key].append(seconds)
            if number >= _LEAST_ROUNDS and time.perf_counter() - began > _SECONDS:
                break
        for slot in range(self._most):
            self._session.reset(slot)
        self._session.drafting = following
        medians = {key: statistics.median(values) for key, values in samples.items()}

        def row(name: str, sequences: int) -> list[float]:
            return [medians[name, sequences, k] for k in range(1 + self._block) if (name, sequences, k) in medians]

        return Profile(
            engine,
            self._session.hardware,
            batches,
            [medians["plain", sequences, 0] for sequences in batches],
            [medians["draft", sequences, 0] for sequences in batches],
            [row("verify", sequences) for sequences in batches],
        )

    def _round(self, batches: list[int]) -> Iterator[tuple[tuple[str, int, int], float]]:
        session = self._session
        for sequences in batches:
            session.drafting = True
            for slot in range(sequences):
                session.reset(slot)
                session.prefill(self._some(self._context), slot=slot)
            room = min(session.room.tokens, session.room.rows)
            for k in range(1 + min(self._block, room // sequences - 1)):
                tokens = {slot: self._some(1 + k) for slot in range(sequences)}
                yield ("verify", sequences, k), seconds_of(partial(self._verify, tokens))
            last = {slot: self._some(1)[0] for slot in range(sequences)}
            yield ("draft", sequences, 0), seconds_of(partial(session.draft, last))
            session.drafting = False
            step = {slot: self._some(1) for slot in range(sequences)}
            yield ("plain", sequences, 0), seconds_of(partial(session.step, step))

    def _verify(self, tokens: dict[int, list[int]]) -> None:
        self._session.verify(tokens)
        for slot in tokens:
            self._session.rewind(self._context, slot=slot)

    def _some(self, count: int) -> list[int]:
        if self._taken + count > len(self._tokens):
            self._taken = 0
        self._taken += count
        return self._tokens[self._taken - count : self._taken]


def seconds_of(work: Callable[[], object]) -> float:
    """Wall time of a call."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _write(path: Path, content: bytes) -> None:
    """Put a file in place as a whole."""
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        unfinished.write_bytes(content)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
