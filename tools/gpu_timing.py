"""Times on a GPU by the clock of the host: recordings long enough that what surrounds a replay does not count."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from v41c.runtime.cuda import Driver

#: a replay lasts about this long: a host's call and wait, some 20 us, are a hundredth of it
REPLAY_SECONDS = 2e-3
MOST_LAUNCHES = 512
ROUNDS = 11
Clock = Callable[[], float]


@dataclass(frozen=True)
class Timing:
    """Median seconds of one run, and the distance of the quartiles as a share of it."""

    seconds: float
    spread: float


def copies(touched_bytes: int, held_bytes: int, cache_bytes: int, room_bytes: int) -> int:
    """How many sets of buffers to go through in turns, so that none is in the cache when its turn comes again.

    Two caches' worth of what a run touches, at most 64 sets, and no more than there is room for.
    """
    wanted = -(-2 * cache_bytes // max(touched_bytes, 1))
    return max(1, min(wanted, 64, room_bytes // max(held_bytes, 1)))


def measure(driver: Driver, runs: Sequence[Callable[[], None]], clock: Clock = time.perf_counter) -> Timing:
    """The time of one of `runs`, which go through different buffers in turns, as replays of a recording of many."""

    def timed(work: Callable[[], None]) -> float:
        began = clock()
        work()
        driver.synchronize()
        return clock() - began

    def all_runs() -> None:
        for run in runs:
            run()

    timed(all_runs)  # loads what is loaded at the first launch
    estimate = timed(all_runs) / len(runs)
    count = launches(estimate, len(runs))
    driver.begin_recording()
    for number in range(count):
        runs[number % len(runs)]()
    recording = driver.end_recording()
    timed(lambda: driver.replay(recording))
    return timing([timed(lambda: driver.replay(recording)) / count for _ in range(ROUNDS)])


def launches(seconds: float, sets: int) -> int:
    """How many runs of so many seconds a recording holds: whole turns through all sets, for a replay of some length."""
    wanted = min(max(REPLAY_SECONDS / max(seconds, 1e-9), 1), MOST_LAUNCHES)
    return sets * max(1, -(-int(wanted) // sets))


def timing(samples: Sequence[float]) -> Timing:
    """Median and spread of samples in seconds."""
    median = statistics.median(samples)
    if len(samples) < 2:
        return Timing(median, 0.0)
    low, _, high = statistics.quantiles(samples, n=4)
    return Timing(median, (high - low) / median if median else 0.0)
