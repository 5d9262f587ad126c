"""Sampling: the filters' definitions, checked against a plain second writing of them, and the draws' distribution."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from v41c.errors import ArtifactError, UsageError
from v41c.runtime.sampling import Sampler, Sampling, distribution, draw, greedy

# Few distinct values, so that ties are common.
logit_lists = st.lists(
    st.one_of(st.integers(-4, 4).map(float), st.floats(-80, 80, width=32), st.just(-np.inf)), min_size=1, max_size=40
).filter(lambda values: max(values) > -np.inf)
samplings = st.builds(
    Sampling,
    temperature=st.floats(0.01, 5),
    top_k=st.integers(0, 45),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 1),
    seed=st.integers(0, 2**32),
)


def softmax(logits: list[float], temperature: float) -> np.ndarray:
    values = np.array(logits, np.float32).astype(np.float64)
    weights: np.ndarray = np.exp((values - values.max()) / temperature)
    shares: np.ndarray = weights / weights.sum()
    return shares


@given(logits=logit_lists)
def test_greedy_takes_the_lowest_of_the_largest(logits: list[float]) -> None:
    values = np.array(logits, np.float32)
    assert greedy(values) == values.tolist().index(max(values.tolist()))
    assert Sampler(Sampling())(values) == greedy(values)
    assert distribution(values, Sampling())[greedy(values)] == 1.0


@given(logits=logit_lists, temperature=st.floats(0.01, 5))
def test_temperature_alone_is_softmax(logits: list[float], temperature: float) -> None:
    found = distribution(np.array(logits, np.float32), Sampling(temperature=temperature))
    np.testing.assert_allclose(found, softmax(logits, temperature), rtol=1e-12)


@given(logits=logit_lists, sampling=samplings)
def test_filters_keep_what_they_say(logits: list[float], sampling: Sampling) -> None:
    found = distribution(np.array(logits, np.float32), sampling)
    assert found.sum() == pytest.approx(1)
    whole = softmax(logits, sampling.temperature)
    ranked = sorted(range(len(logits)), key=lambda token: (-whole[token], token))
    kept = ranked[: sampling.top_k or None]
    share = np.cumsum([whole[token] for token in kept]) / sum(whole[token] for token in kept)
    # Where a share is within rounding of the limit either answer is right.
    short = int(np.count_nonzero(share < sampling.top_p - 1e-9))
    long = int(np.count_nonzero(share < sampling.top_p + 1e-9))
    possible = []
    for count in range(short, long + 1):
        left = kept if sampling.top_p == 1 else kept[: count + 1]
        possible.append({token for token in left if whole[token] >= sampling.min_p * whole[ranked[0]] * (1 - 1e-12)})
    assert set(np.flatnonzero(found).tolist()) in [{t for t in left if whole[t] > 0} for left in possible]
    support = np.flatnonzero(found)
    np.testing.assert_allclose(found[support], whole[support] / whole[support].sum(), rtol=1e-9)


@given(logits=logit_lists, sampling=samplings)
def test_a_seed_decides_every_token(logits: list[float], sampling: Sampling) -> None:
    values = np.array(logits, np.float32)
    one, two = Sampler(sampling), Sampler(sampling)
    tokens = [one(values) for _ in range(8)]
    assert tokens == [two(values) for _ in range(8)]
    possible = np.flatnonzero(distribution(values, sampling))
    assert set(tokens) <= set(possible.tolist())


def test_draws_follow_the_distribution() -> None:
    logits = np.array([1.0, 0.0, -np.inf, 2.0, 0.5], np.float32)
    sampling = Sampling(temperature=0.8, seed=11)
    sampler = Sampler(sampling)
    count = 20000
    found = np.bincount([sampler(logits) for _ in range(count)], minlength=5)
    wanted = distribution(logits, sampling) * count
    assert found[2] == 0
    # Chi-square with 3 degrees of freedom exceeds 16.3 once in a thousand seeds.
    kept = wanted > 0
    assert float(((found[kept] - wanted[kept]) ** 2 / wanted[kept]).sum()) < 16.3


def test_seeds_differ() -> None:
    logits = np.zeros(50, np.float32)
    one, two = (Sampler(Sampling(temperature=1.0, seed=seed)) for seed in (1, 2))
    assert [one(logits) for _ in range(10)] != [two(logits) for _ in range(10)]


def test_a_draw_at_the_very_top_takes_the_last_possible_token() -> None:
    class Top:
        def random(self) -> float:
            return float(np.nextafter(1.0, 0.0))

    assert draw(np.array([0.25, 0.75, 0.0]), Top()) == 1  # type: ignore[arg-type]


def test_a_tiny_temperature_is_greedy_and_not_an_overflow() -> None:
    logits = np.array([3.0, 90.0, 89.0], np.float32)
    assert distribution(logits, Sampling(temperature=1e-300)).tolist() == [0.0, 1.0, 0.0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("logits", "match"),
    [
        ([1.0, np.nan, 2.0], "logits: expected numbers, got nan for token 1: the engine or its checkpoint is damaged"),
        ([1.0, 3.0, np.inf], "got inf for token 2"),
        ([-np.inf, -np.inf], "got -inf for token 0"),
    ],
)
def test_logits_that_are_no_numbers_are_refused(logits: list[float], match: str, temperature: float) -> None:
    with pytest.raises(ArtifactError, match=match):
        Sampler(Sampling(temperature=temperature))(np.array(logits, np.float32))


@pytest.mark.parametrize(
    ("field", "value", "match"),
    [
        ("temperature", -0.1, r"temperature: expected 0 \(greedy\) or more, got -0.1"),
        ("temperature", float("nan"), "temperature: expected .* got nan"),
        ("temperature", float("inf"), "temperature: expected .* got inf"),
        ("top_k", -1, r"top-k: expected 0 \(all\) or more, got -1"),
        ("top_p", 0.0, "top-p: expected more than 0 and at most 1, got 0.0"),
        ("top_p", 1.5, "top-p: expected .* got 1.5"),
        ("min_p", 1.01, "min-p: expected 0 to 1, got 1.01"),
        ("seed", -2, "seed: expected 0 or more, got -2"),
    ],
)
def test_bad_options_are_refused(field: str, value: float, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        replace(Sampling(), **{field: value})  # type: ignore[arg-type]
