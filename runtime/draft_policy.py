"""Whether to draft and how many drafts to verify, decided step by step by what makes the most tokens per second."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np

from v41c.runtime.drafting import Doubles, choose_lengths

#: conditional acceptance that a draft head is supposed to have before it was seen at work
_SUPPOSED = 0.7
#: steps that averages of times look back on, and drafts that those of acceptance do, which varies far more
_TIMED, _COUNTED = 16, 64
#: share of decoding time that may be spent on finding out whether drafting has come to pay, and back
_EXPLORED = 0.01
#: steps without drafting from one decision to the next: deciding takes time as well
_SETTLED = 8
#: drafted steps of such an attempt
_ATTEMPTS = 4
#: steps of drafting between two without, which tell what those take by now
_LOOK_BACK = 64
#: steps after which a kind of step that was not seen is supposed to have become slower or faster as the other kind did
_STALE = 32
#: most by which one measurement of a time counts above or below the average: the system may have been elsewhere
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


class Policy(Protocol):
    """Decides, step by step, whether to draft and how many drafts to verify."""

    @property
    def follows(self) -> bool:
        """Whether steps keep up the draft head's context, without which there are no good drafts."""

    def wants(self, sequences: int) -> bool:
        """Whether to draft before the next step, of so many sequences."""

    def lengths(self, survivals: Mapping[int, Doubles], most_drafts: int) -> dict[int, int]:
        """How many drafts to verify by slot: no more than it has survivals, and `most_drafts` in all."""

    def learn(self, outcome: Outcome) -> None:
        """Take notice of a step that decoded."""


@dataclass(frozen=True)
class Fixed:
    """Verifies the same number of drafts in every step, 0 for none."""

    length: int

    @property
    def follows(self) -> bool:
        """When there is anything to verify."""
        return self.length > 0

    def wants(self, sequences: int) -> bool:
        """When there is anything to verify."""
        return self.length > 0

    def lengths(self, survivals: Mapping[int, Doubles], most_drafts: int) -> dict[int, int]:
        """`length` of each sequence, fewer of the last ones where there is no room for more."""
        chosen = {}
        for slot, survived in survivals.items():
            chosen[slot] = min(self.length, len(survived), most_drafts)
            most_drafts -= chosen[slot]
        return chosen

    def learn(self, outcome: Outcome) -> None:
        """Nothing to be learned."""


class Auto:
    """Drafts when that makes more tokens per second than not drafting, and verifies as many as make the most.

    While it does not draft, it spends 1 % of the time on attempts: steps that keep up the draft head's context until it
    is a window long, then a few that draft. While it drafts, one step in 64 does not. So neither judgement grows old.
    """

    def __init__(self, times: Times, block: int, window: int) -> None:
        """`block`: drafts of a step at most. `window`: positions of context that a draft can look at."""
        self._window = window
        self._seen = _Experience(times, block)
        self._drafting = self._seen.pays(1)
        #: steps of the attempt that are left, steps of context that it has, and seconds that the next one may take
        self._attempts, self._context, self._allowance = 0, window, 0.0
        self._since_plain = 0
        #: sequences that was last decided for, and plain steps until it is decided again
        self._sequences, self._settled = 1, 0

    @property
    def follows(self) -> bool:
        """While drafting pays or is attempted."""
        return self._drafting or self._attempts > 0

    def wants(self, sequences: int) -> bool:
        """Whether drafting pays by all that is known, or is attempted to know more, and has the context it needs."""
        self._settled -= 1
        if self._settled <= 0 or sequences != self._sequences:
            self._sequences, self._settled = sequences, 1 if self.follows else _SETTLED
            self._drafting = self._seen.pays(sequences)
            if not self.follows and self._allowance > self._seen.attempt_seconds(sequences, self._window):
                self._attempts, self._allowance = _ATTEMPTS, 0.0
        return self.follows and self._context >= self._window and self._since_plain < _LOOK_BACK

    def lengths(self, survivals: Mapping[int, Doubles], most_drafts: int) -> dict[int, int]:
        """Those of the highest speed, by the survivals as experience corrects them."""
        expected = {slot: np.minimum(survived * self._seen.kept, 1.0) for slot, survived in survivals.items()}
        most = min(most_drafts, sum(len(survived) for survived in survivals.values()))
        return choose_lengths(expected, self._seen.seconds(len(survivals))[: most + 1])

    def learn(self, outcome: Outcome) -> None:
        """Correct what is known by what the step was seen to do."""
        drafted = len(outcome.survivals) > 0
        self._seen.learn(outcome, self.follows)
        self._context = self._context + 1 if self.follows else 0
        self._since_plain = self._since_plain + 1 if drafted else 0
        self._attempts -= drafted and self._attempts > 0
        if not self.follows:
            self._allowance += _EXPLORED * self._seen.plain_seconds(outcome.sequences)


class _Average:
    """A mean that looks back on so many observations; the first value counts as one."""

    def __init__(self, value: float, memory: int) -> None:
        self.value = value
        self._count, self._memory = 1, memory

    def add(self, value: float) -> None:
        self._count = min(self._count + 1, self._memory)
        self.value += (value - self.value) / self._count


class _Pace:
    """How long steps of one kind take beside the profile."""

    def __init__(self) -> None:
        self.average = _Average(1.0, _TIMED)
        self._unseen = 0

    @property
    def value(self) -> float:
        return self.average.value

    def add(self, ratio: float, other: _Pace) -> None:
        """A step took `ratio` times as long. If the `other` kind has not been seen of late, it changes alike."""
        before = self.value
        self.average.add(min(max(ratio, before / _OUTLIER), before * _OUTLIER))
        self._unseen = 0
        other._unseen += 1
        if other._unseen > _STALE:
            other.average.value *= self.value / before


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


class _Experience:
    """Speeds with and without drafts: profiled times and the draft head's promises, corrected by what was seen.

    kept: accepted drafts for each one that the head promised.
    """

    def __init__(self, times: Times, block: int) -> None:
        self._times, self._block = times, block
        self._plain, self._drafted = _Pace(), _Pace()
        self._survival = [_Average(_SUPPOSED ** (place + 1), _COUNTED) for place in range(block)]
        self._promised, self._accepted = _Average(1.0, _COUNTED), _Average(1.0, _COUNTED)
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
        return best * steps.plain * self._plain.value > self._drafted.value

    def plain_seconds(self, sequences: int) -> float:
        """What a step without drafts takes by now."""
        return self._of(sequences).plain * self._plain.value

    def attempt_seconds(self, sequences: int, window: int) -> float:
        """What a window of context and some drafted steps take beyond steps without, if every draft is rejected."""
        steps = self._of(sequences)
        context = (steps.followed - steps.plain) * self._plain.value
        drafted = steps.alike[-1] * self._drafted.value - steps.plain * self._plain.value
        return window * max(context, 0.0) + _ATTEMPTS * max(drafted, 0.0)

    def learn(self, outcome: Outcome, followed: bool) -> None:
        for survived in outcome.survivals:
            for average, value in zip(self._survival, survived.tolist(), strict=True):
                average.add(value)
        if outcome.verified:
            self._promised.add(outcome.promised)
            self._accepted.add(outcome.accepted)
        if outcome.seconds is None:
            return
        steps = self._of(outcome.sequences)
        if outcome.survivals:
            self._drafted.add(outcome.seconds / float(steps.drafted[outcome.verified]), self._plain)
        else:
            self._plain.add(outcome.seconds / (steps.followed if followed else steps.plain), self._drafted)

    def _of(self, sequences: int) -> _Steps:
        if sequences not in self._steps:
            self._steps[sequences] = _Steps(self._times, sequences, self._block)
        return self._steps[sequences]
