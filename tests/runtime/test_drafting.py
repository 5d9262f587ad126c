"""The mathematics of speculative decoding: survival, lengths, acceptance, and what is counted of it."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from v41c.runtime.drafting import DraftReport, accept, choose_lengths, survival
from v41c.runtime.sampling import Sampler, Sampling, distribution

EXAMPLE = np.array([0.94, 0.88, 0.81, 0.73, 0.61])


def logits_of(probabilities: np.ndarray) -> np.ndarray:
    found: np.ndarray = np.log(probabilities / (1 - probabilities))
    return found


def test_survival_is_the_product_of_conditional_probabilities() -> None:
    survived = survival(logits_of(EXAMPLE))
    np.testing.assert_allclose(survived, [0.94, 0.8272, 0.670032, 0.48912336, 0.2983652496], rtol=1e-12)
    assert survived.sum() == pytest.approx(3.2247206, abs=5e-8)


def test_confidences_without_bounds_are_probabilities_still() -> None:
    confidence = np.array([1000.0, 1000.0, -1000.0, 5.0], np.float32)
    assert survival(confidence).tolist() == [1.0, 1.0, 0.0, 0.0]
    assert survival(np.array([np.inf, np.nan, np.inf], np.float32)).tolist() == [1.0, 0.0, 0.0]
    assert survival(np.empty(0, np.float32)).tolist() == []


survivals_of = st.lists(st.floats(0, 1), max_size=3).map(lambda values: np.array(sorted(values, reverse=True)))


@settings(max_examples=200)
@given(
    survivals=st.dictionaries(st.integers(0, 9), survivals_of, min_size=1, max_size=3),
    seconds=st.lists(st.floats(0.1, 10), min_size=1, max_size=10).map(np.array),
)
def test_no_other_lengths_make_more_tokens_per_second(survivals: dict[int, np.ndarray], seconds: np.ndarray) -> None:
    def speed(lengths: tuple[int, ...]) -> float:
        kept = sum(float(v[:n].sum()) for v, n in zip(survivals.values(), lengths, strict=True))
        return (len(survivals) + kept) / float(seconds[sum(lengths)])

    chosen = choose_lengths(survivals, seconds)
    assert list(chosen) == list(survivals)
    possible = itertools.product(*(range(len(values) + 1) for values in survivals.values()))
    best = max(speed(lengths) for lengths in possible if sum(lengths) < len(seconds))
    assert speed(tuple(chosen.values())) == pytest.approx(best, rel=1e-12)


def test_a_sure_sequence_gets_the_drafts_of_an_unsure_one() -> None:
    survivals = {4: np.array([0.9, 0.8, 0.7]), 2: np.array([0.3, 0.1, 0.0])}
    # free up to three drafts, then dear
    assert choose_lengths(survivals, np.array([1.0, 1.0, 1.0, 1.0, 9.0, 9.0, 9.0])) == {4: 3, 2: 0}
    assert choose_lengths(survivals, np.full(7, 1.0)) == {4: 3, 2: 2}
    assert choose_lengths(survivals, np.array([1.0, 2.0, 3.0])) == {4: 0, 2: 0}
    assert choose_lengths({}, np.array([1.0])) == {}


@given(
    own=st.lists(st.integers(0, 3), min_size=1, max_size=6),
    drafted=st.lists(st.integers(0, 3), max_size=5),
    end=st.integers(0, 9),
)
def test_the_longest_prefix_of_own_choices_is_accepted(own: list[int], drafted: list[int], end: int) -> None:
    drafts = drafted[: len(own) - 1]
    logits = np.eye(4)[own[: len(drafts) + 1]]
    chosen: list[int | None] = []

    def choose(row: np.ndarray) -> int | None:
        chosen.append(None if len(chosen) == end else int(row.argmax()))
        return chosen[-1]

    accepted = accept(logits, drafts, choose)
    alike = [a == b for a, b in zip(own, drafts, strict=False)]
    prefix = [*alike, False].index(False)
    assert accepted == min(prefix, end)
    assert chosen == [*own[: min(prefix + 1, end)], *[None] * (end <= prefix)]


def test_samples_follow_the_model_whatever_is_drafted() -> None:
    generator = np.random.default_rng(3)
    logits = generator.normal(size=(3, 6)).astype(np.float32) * 2
    sampling = Sampling(temperature=0.9, top_k=5, top_p=0.95, min_p=0.01, seed=5)
    wanted = [distribution(row, sampling) for row in logits]
    count = 6000
    for drafts in ([0, 1], [int(wanted[0].argmax()), int(wanted[1].argmax())], [int(logits[0].argmin()), 2]):
        sampler = Sampler(sampling)
        places: list[list[int]] = [[], [], []]
        accepted = 0
        for _ in range(count):
            tokens: list[int] = []

            def choose(row: np.ndarray, tokens: list[int] = tokens, sampler: Sampler = sampler) -> int:
                tokens.append(sampler(row))
                return tokens[-1]

            accepted += accept(logits, drafts, choose) > 0
            for place, token in enumerate(tokens):
                places[place].append(token)
        # how often a draft is accepted, within five standard deviations
        share = float(wanted[0][drafts[0]])
        assert abs(accepted - count * share) <= 5 * math.sqrt(count * share * (1 - share))
        for found, probabilities in zip(places, wanted, strict=True):
            if len(found) < 100:
                continue
            counts, expected = np.bincount(found, minlength=6), probabilities * len(found)
            assert not counts[expected == 0].any()
            kept = expected > 0
            # chi-square with at most 5 degrees of freedom exceeds 20.5 once in a thousand seeds
            assert float(((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum()) < 20.5


def test_a_seed_gives_the_same_tokens_with_drafts_and_without() -> None:
    generator = np.random.default_rng(8)
    table = generator.normal(size=(5, 5)).astype(np.float32)  # logits after each token
    sampling = Sampling(temperature=1.3, seed=2)
    plain, sampler = [0], Sampler(sampling)
    while len(plain) < 200:
        plain.append(sampler(table[plain[-1]]))
    tokens, sampler = [0], Sampler(sampling)

    def choose(row: np.ndarray) -> int:
        tokens.append(sampler(row))
        return tokens[-1]

    accepted = 0
    while len(tokens) < 200:
        drafts = generator.integers(0, 5, 3).tolist()
        accepted += accept(table[[tokens[-1], *drafts]], drafts, choose)
    assert tokens[:200] == plain
    assert accepted > 10


def test_a_report_counts_what_was_put_to_the_test() -> None:
    report = DraftReport(3)
    report.count(np.array([0.9, 0.45, 0.09]), 1)  # conditional probabilities 0.9, 0.5, 0.2
    report.count(np.array([0.95]), 1)
    report.count(np.array([]), 0)
    other = DraftReport(3)
    other.count(np.array([1.0, 0.5]), 0)
    report.add(other)
    assert (report.steps, report.tokens, report.tokens_per_step) == (4, 6, 1.5)
    assert report.lengths == [1, 1, 1, 1]
    assert (report.verified, report.accepted) == ([3, 1, 0], [2, 0, 0])
    assert report.acceptance == [2 / 3, 0.0, None]
    assert report.calibration == [(0.5, 0.0, 1), (pytest.approx(0.95), pytest.approx(2 / 3), 3)]
    assert report.summary() == (
        "drafts: 1.50 tokens a step; accepted by place 67% 0% -; verified 0: 1, 1: 1, 2: 1, 3: 1"
    )
    assert report.to_json()["calibration"][0] == {"mean_probability": 0.5, "accepted": 0.0, "drafts": 1}
    assert DraftReport(2).tokens_per_step == 0.0
