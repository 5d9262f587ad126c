"""What is known of the speed with drafts and without: profiled times, corrected by what steps were seen to do."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np

from v41c.runtime.drafting import Doubles

#: conditional acceptance that a draft head is supposed to have before it was seen at work
_SUPPOSED = 0.8
#: blocks of drafts that averages of promises look back on, and of acceptance, which varies more
_PROMISED, _COUNTED = 16, 64
#: steps that say how long steps take by now, and comparisons of both kinds of steps that are remembered
_RECENT, _COMPARED = 8, 8
#: most by which one comparison counts above or below what was known: the system may have been elsewhere
_OUTLIER = 2.0


class Times(Protocol):
    """Seconds of steps on this machine."""

    def plain(self, sequences: int) -> float:
        """A step of one token of each sequence, without the draft head's context."""

    def verify(self, sequences: int, tokens: int) -> float:
        """A step of so many tokens of the sequences together, with the draft head's context and a rollback."""

    def draft(self, sequences: int) -> float:
        """A block of drafts for each sequence."""


class Outcome(msgspec.Struct, frozen=True):
    """What a step did for the sequences that decode.

    sequences: how many. survivals: of all drafts, f64 [block] for each sequence; none when it did not draft.
    verified, accepted: drafts in all. promised: those that the draft head expected to be accepted of the verified.
    seconds: of drafting, step and acceptance; None when the step did other work beside.
    """

    sequences: int
    seconds: float | None
    survivals: Sequence[Doubles] = ()
    verified: int = 0
    accepted: int = 0
    promised: float = 0.0


class Experience:
    """Speeds with drafts and without. What counts is how they compare: whatever slows the machine down slows both.

    kept: accepted drafts for each one that the draft head promised.
    """

    def __init__(self, times: Times, block: int) -> None:
        self._times, self._block = times, block
        self._survival = [_Average(_SUPPOSED ** (place + 1), _PROMISED) for place in range(block)]
        self._promised, self._accepted = _Average(1.0, _COUNTED), _Average(1.0, _COUNTED)
        #: how long steps of the kind that is usual by now took beside the profile
        self._recent: deque[float] = deque(maxlen=_RECENT)
        #: logarithm of how much longer than by the profile plain steps take beside drafted ones
        self._dearer = _Average(0.0, _COMPARED)
        self._usual = self._last = False
        self._steps: dict[int, _Steps] = {}

    @property
    def kept(self) -> float:
        return self._accepted.value / self._promised.value if self._promised.value > 0 else 0.0

    def seconds(self, sequences: int) -> Doubles:
        """Profiled times f64 [1 + sequences · block] of drafting and a step that verifies so many drafts in all."""
        return self._of(sequences).drafted

    def pays(self, sequences: int) -> bool:
        """Whether some length, the same for all sequences, promises more tokens per second than none."""
        steps, kept, tokens, best = self._of(sequences), self.kept, 1.0, 0.0
        for survived, seconds in zip(self._survival, steps.alike[1:], strict=True):
            tokens += min(survived.value * kept, 1.0)
            best = max(best, tokens / seconds)
        return best * steps.plain * math.exp(self._dearer.value) > 1

    def attempt_steps(self, sequences: int, window: int, drafted: int) -> float:
        """Plain steps in whose time a window of context and some drafted steps fit, if every draft is rejected."""
        steps = self._of(sequences)
        dear = steps.alike[-1] / steps.plain / math.exp(self._dearer.value)
        return window * max(steps.followed / steps.plain - 1, 0.0) + drafted * max(dear - 1, 0.0)

    def overspent(self, outcome: Outcome) -> float:
        """Plain steps in whose time a step would fit while those are usual, beyond one."""
        if outcome.seconds is None or not self._recent:
            return 0.0
        plain = self._of(outcome.sequences).plain * statistics.median(self._recent)
        return max(0.0, outcome.seconds / plain - 1)

    def learn(self, outcome: Outcome, *, usual: bool, followed: bool) -> None:
        """Notice a step. `usual`: whether drafting is usual by now; `followed`: whether context was kept up."""
        for survived in outcome.survivals:
            for average, value in zip(self._survival, survived.tolist(), strict=True):
                average.add(value)
        if outcome.verified:
            self._promised.add(outcome.promised)
            self._accepted.add(outcome.accepted)
        if outcome.seconds is None:
            return
        steps, drafted = self._of(outcome.sequences), len(outcome.survivals) > 0
        if drafted:
            ratio = outcome.seconds / float(steps.drafted[outcome.verified])
        else:
            ratio = outcome.seconds / (steps.followed if followed else steps.plain)
        if usual != self._usual:
            self._recent.clear()
        # the first step after one of the other kind finds the caches of that one
        elif drafted == usual:
            self._recent.append(ratio)
        elif drafted == self._last and self._recent:
            plain, with_drafts = (statistics.median(self._recent), ratio)[:: -1 if usual else 1]
            self._compare(math.log(plain / with_drafts))
        self._usual, self._last = usual, drafted

    def _compare(self, dearer: float) -> None:
        known, most = self._dearer.value, math.log(_OUTLIER)
        self._dearer.add(min(max(dearer, known - most), known + most))

    def _of(self, sequences: int) -> _Steps:
        if sequences not in self._steps:
            self._steps[sequences] = _Steps(self._times, sequences, self._block)
        return self._steps[sequences]


class _Average:
    """A mean that looks back on so many observations; the first value counts as one."""

    def __init__(self, value: float, memory: int) -> None:
        self.value = value
        self._count, self._memory = 1, memory

    def add(self, value: float) -> None:
        self._count = min(self._count + 1, self._memory)
        self.value += (value - self.value) / self._count


class _Steps:
    """Profiled times of steps of so many sequences: plain, with the draft head's context, and drafted by number."""

    def __init__(self, times: Times, sequences: int, block: int) -> None:
        self.plain = times.plain(sequences)
        self.followed = times.verify(sequences, sequences)
        drafting = times.draft(sequences)
        counts = range(sequences * block + 1)
        self.drafted = np.array([drafting + times.verify(sequences, sequences + count) for count in counts])
        #: with the same number of drafts for each, by that number
        self.alike: list[float] = self.drafted[::sequences].tolist()
