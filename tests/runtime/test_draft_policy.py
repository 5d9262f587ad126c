"""Policies of drafting in a world of made-up times and acceptance: what they choose, and what time they lose."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from v41c.runtime.draft_experience import Outcome
from v41c.runtime.draft_policy import Auto, Fixed, Policy

BLOCK, WINDOW = 5, 32


@dataclass(frozen=True)
class World:
    """Steps that take `fixed` seconds and `each` more per token; drafts accepted with a probability each."""

    fixed: float
    each: float
    drafting: float
    acceptance: float
    context: float = 0.0
    sure: float | None = None

    def plain(self, sequences: int) -> float:
        """As `Times.plain`."""
        return self.fixed + self.each * sequences

    def verify(self, sequences: int, tokens: int) -> float:
        """As `Times.verify`."""
        return self.fixed + self.each * tokens + self.context

    def draft(self, sequences: int) -> float:
        """As `Times.draft`."""
        return self.drafting

    def best(self, sequences: int = 1) -> float:
        """Seconds per token with the best fixed length, by expectation."""
        found = [self.plain(sequences)]
        for length in range(1, BLOCK + 1):
            took = self.drafting + self.verify(sequences, sequences * (1 + length))
            found.append(took / sum(self.acceptance**place for place in range(length + 1)))
        return min(found)


class Clock:
    """Runs a policy in a world, for `sequences` at once: seconds that a token took, and steps that drafted."""

    def __init__(self, seed: int = 1, noise: float = 0.0) -> None:
        """`noise`: standard deviation of the logarithm of times."""
        self._random = np.random.default_rng(seed)
        self._noise = noise

    def run(self, policy: Policy, world: World, tokens: int, sequences: int = 1) -> tuple[float, int]:
        """Time per token of one sequence, and how many steps drafted."""
        made, seconds, drafted = 0, 0.0, 0
        while made < tokens * sequences:
            if not policy.wants(sequences):
                took = world.verify(sequences, sequences) if policy.follows else world.plain(sequences)
                took *= self._disturbed()
                steps = 1 + policy.learn(Outcome(sequences, took))
                made, seconds = made + steps * sequences, seconds + steps * took
                continue
            drafted += 1
            assert policy.follows
            promise = np.cumprod(np.full(BLOCK, world.acceptance if world.sure is None else world.sure))
            lengths = policy.lengths({slot: promise for slot in range(sequences)}, 64)
            accepted = sum(self._accepted(world, length) for length in lengths.values())
            verified = sum(lengths.values())
            took = (world.draft(sequences) + world.verify(sequences, sequences + verified)) * self._disturbed()
            promised = sum(float(promise[:length].sum()) for length in lengths.values())
            policy.learn(Outcome(sequences, took, [promise] * sequences, verified, accepted, promised))
            made, seconds = made + sequences + accepted, seconds + took
        return seconds / made * sequences, drafted

    def _disturbed(self) -> float:
        return float(np.exp(self._random.normal() * self._noise))

    def _accepted(self, world: World, length: int) -> int:
        passed = self._random.random(length) < world.acceptance
        return int(np.cumprod(passed).sum()) if length else 0


#: weights that a step reads once for all of its tokens, and arithmetic that every token costs anew
MEMORY = World(fixed=1.0, each=0.05, drafting=0.2, acceptance=0.7, context=0.02)
ARITHMETIC = World(fixed=0.1, each=0.9, drafting=0.8, acceptance=0.65, context=0.05)


@pytest.mark.parametrize("sequences", [1, 8])
def test_drafting_that_does_not_pay_costs_next_to_nothing(sequences: int) -> None:
    for world in (ARITHMETIC, World(1.0, 0.05, 0.2, 0.0, 0.02, sure=0.0), World(1.0, 0.05, 9.0, 0.9, 0.02)):
        assert Clock().run(Fixed(0), world, 10, sequences) == (pytest.approx(world.plain(sequences)), 0)
        auto, drafted = Clock().run(Auto(world, BLOCK, WINDOW), world, 3000, sequences)
        assert auto < world.plain(sequences) * 1.03
        assert drafted < 100


@pytest.mark.parametrize("sequences", [1, 8])
def test_drafting_that_pays_is_as_good_as_the_best_length(sequences: int) -> None:
    for acceptance in (0.5, 0.7, 0.9):
        world = World(1.0, 0.05, 0.2, acceptance, 0.02)
        auto, _ = Clock().run(Auto(world, BLOCK, WINDOW), world, 6000, sequences)
        assert auto < world.best(sequences) * 1.03


def test_a_head_that_promises_too_much_is_found_out() -> None:
    boastful = World(1.0, 0.3, 0.3, acceptance=0.1, context=0.02, sure=0.95)
    auto, drafted = Clock().run(Auto(boastful, BLOCK, WINDOW), boastful, 3000)
    assert auto < boastful.plain(1) * 1.03
    assert drafted < 150


def test_a_profile_that_is_wrong_is_found_out() -> None:
    for believed, true in ((MEMORY, ARITHMETIC), (ARITHMETIC, MEMORY)):
        policy = Auto(believed, BLOCK, WINDOW)
        assert Clock().run(policy, true, 200)[0] < true.plain(1) * 1.25
        Clock().run(policy, true, 3000)
        assert Clock(2).run(policy, true, 1000)[0] < true.plain(1) * 1.03


@pytest.mark.parametrize("seed", range(4))
def test_noise_costs_little(seed: int) -> None:
    dear = World(1.0, 1.0, 1.0, 0.65, 0.05)  # tokens hardly cost less together than alone
    auto, _ = Clock(seed, 0.4).run(Auto(dear, BLOCK, WINDOW), dear, 2000)
    off, _ = Clock(seed, 0.4).run(Fixed(0), dear, 2000)
    assert auto < off * 1.05
    auto, _ = Clock(seed, 0.4).run(Auto(MEMORY, BLOCK, WINDOW), MEMORY, 2000)
    off, _ = Clock(seed, 0.4).run(Fixed(0), MEMORY, 2000)
    assert auto < off * 0.62
    assert MEMORY.best() < MEMORY.plain(1) * 0.58


def test_drafting_is_taken_up_when_it_comes_to_pay_and_given_up_when_it_no_longer_does() -> None:
    good, bad = World(1.0, 0.3, 0.3, 0.9, 0.02), World(1.0, 0.3, 0.3, 0.05, 0.02)
    policy = Auto(good, BLOCK, WINDOW)
    for world in (bad, good, bad, good):
        Clock().run(policy, world, 4000)
        assert Clock(3).run(policy, world, 3000)[0] < world.best() * 1.03


def test_an_outlier_of_time_changes_no_choice() -> None:
    policy = Auto(MEMORY, BLOCK, WINDOW)
    Clock().run(policy, MEMORY, 200)
    promise = np.cumprod(np.full(BLOCK, 0.7))
    policy.learn(Outcome(1, 1000.0, [promise], 3, 2, float(promise[:3].sum())))
    assert policy.wants(1)


def test_a_fixed_length_is_cut_where_there_is_no_room() -> None:
    survivals = {3: np.ones(5), 0: np.ones(1), 1: np.ones(5)}
    policy = Fixed(3)
    assert policy.wants(3)
    assert policy.follows
    assert policy.lengths(survivals, 64) == {3: 3, 0: 1, 1: 3}
    assert policy.lengths(survivals, 5) == {3: 3, 0: 1, 1: 1}
    assert policy.lengths(survivals, 0) == {3: 0, 0: 0, 1: 0}
    none = Fixed(0)
    assert not none.wants(1)
    assert not none.follows


def test_lengths_keep_to_what_there_is_room_for() -> None:
    policy = Auto(MEMORY, BLOCK, WINDOW)
    survivals = {0: np.array([0.9, 0.8]), 1: np.ones(5)}
    assert policy.lengths(survivals, 64) == {0: 2, 1: 5}
    assert policy.lengths(survivals, 4) == {0: 0, 1: 4}
    assert policy.lengths({0: np.empty(0)}, 64) == {0: 0}


def test_a_machine_that_slows_down_changes_no_choice() -> None:
    for world in (MEMORY, ARITHMETIC):
        slower = replace(world, fixed=world.fixed * 3, each=world.each * 3, drafting=world.drafting * 3)
        policy = Auto(world, BLOCK, WINDOW)
        Clock().run(policy, world, 400)
        drafting = policy.follows
        assert drafting == (world is MEMORY)
        for _ in range(3):
            _, drafted = Clock().run(policy, slower, 100)
            assert (drafted > 20) == drafting
            assert policy.follows == drafting
