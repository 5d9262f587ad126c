"""Whether to draft and how many drafts to verify, decided step by step by what makes the most tokens per second."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from v41c.runtime.draft_experience import Experience, Outcome, Times
from v41c.runtime.drafting import Doubles, choose_lengths

#: share of decoding time that may be spent on finding out whether drafting has come to pay
_EXPLORED = 0.01
#: drafted steps of such an attempt
_ATTEMPTS = 4
#: steps of drafting before a look at what plain steps take: at first, then twice as many each time, and at most
_FIRST_LOOK, _LATER_LOOKS = 4, 256
#: plain steps of such a look
_LOOKED = 2
#: plain steps from one question whether drafting pays to the next: to ask takes time as well
_RESTED = 8


class Policy(Protocol):
    """Decides, step by step, whether to draft and how many drafts to verify."""

    @property
    def follows(self) -> bool:
        """Whether steps keep up the draft head's context, without which there are no good drafts."""

    def wants(self, sequences: int) -> bool:
        """Whether to draft before the next step, of so many sequences."""

    def lengths(self, survivals: Mapping[int, Doubles], most_drafts: int) -> dict[int, int]:
        """How many drafts to verify by slot: no more than it has survivals, and `most_drafts` in all."""

    def learn(self, outcome: Outcome) -> int:
        """Take notice of a step that decoded; for how many more of the same sequences nothing need be asked or told.

        `wants` would be false in those.
        """


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

    def learn(self, outcome: Outcome) -> int:
        """Nothing to be learned."""
        return 0


class Auto:
    """Drafts when that makes more tokens per second than not drafting, and verifies as many as make the most.

    While it does not draft, it spends 1 % of the time on attempts: steps that keep up the draft head's context until it
    is a window long, then a few that draft. While it drafts, it takes some steps without, often at first and seldom
    later. So neither judgement is built on the profile alone or grows old.
    """

    def __init__(self, times: Times, block: int, window: int) -> None:
        """`block`: drafts of a step at most. `window`: positions of context that a draft can look at."""
        self._window = window
        self._seen = Experience(times, block)
        self._usual = self._seen.pays(1)
        #: steps of context that there are, as far as it matters
        self._context = window
        #: drafted steps that are left of an attempt, and plain steps in whose time the next one has to fit; below zero
        #: where the last one took longer than it should
        self._attempts, self._allowance = 0, 0.0
        #: drafted steps from look to look, those that are left, and plain steps of the look that are left
        self._interval = self._until_look = _FIRST_LOOK
        self._look = _LOOKED

    @property
    def follows(self) -> bool:
        """While drafting pays or is attempted."""
        return self._usual or self._attempts > 0

    def wants(self, sequences: int) -> bool:
        """Whether drafting pays by all that is known, or is attempted to know more, and has the context it needs."""
        usual = self._seen.pays(sequences)
        if usual and not self._usual:
            self._interval = self._until_look = _FIRST_LOOK
        self._usual = usual
        if not self.follows and self._allowance > self._seen.attempt_steps(sequences, self._window, _ATTEMPTS):
            self._attempts = _ATTEMPTS
        return self.follows and self._context >= self._window and (not usual or self._until_look > 0)

    def lengths(self, survivals: Mapping[int, Doubles], most_drafts: int) -> dict[int, int]:
        """Those of the highest speed, by the survivals as experience corrects them."""
        expected = {slot: np.minimum(survived * self._seen.kept, 1.0) for slot, survived in survivals.items()}
        most = min(most_drafts, sum(len(survived) for survived in survivals.values()))
        return choose_lengths(expected, self._seen.seconds(len(survivals))[: most + 1])

    def learn(self, outcome: Outcome) -> int:
        """Correct what is known by what the step was seen to do."""
        drafted, follows = len(outcome.survivals) > 0, self.follows
        if self._attempts:
            self._allowance -= self._seen.overspent(outcome)
        self._seen.learn(outcome, usual=self._usual, followed=follows)
        if not follows:
            self._context = 0
            self._allowance += _EXPLORED * _RESTED
            return _RESTED - 1
        self._context += 1
        if drafted:
            self._attempts = max(0, self._attempts - 1)
            self._until_look -= 1
        elif self._usual and self._until_look <= 0:
            self._look -= 1
            if not self._look:
                self._look = _LOOKED
                self._interval = min(2 * self._interval, _LATER_LOOKS)
                self._until_look = self._interval
        return 0
