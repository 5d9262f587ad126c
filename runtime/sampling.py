"""Logits to a token: greedy, or drawn from a filtered distribution that a seed makes reproducible."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from v41c.errors import ArtifactError, UsageError

Probabilities = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Sampling:
    """How to choose a token. Filters apply in the order of the fields, each to what the ones before it left.

    temperature: divides the logits; 0 takes the largest logit, ties going to the lower token, and ignores the rest.
    top_k: only the k most probable tokens (ties go to the lower token); 0 keeps all.
    top_p: only the most probable tokens that reach a share of p together, the one that reaches it included.
    min_p: only tokens at least min_p times as probable as the most probable one.
    seed: of the generator (PCG64), which is drawn from once per token.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        """UsageError for a value outside its range."""
        for name, value, fits, expected in (
            ("temperature", self.temperature, 0 <= self.temperature < math.inf, "0 (greedy) or more"),
            ("top-k", self.top_k, self.top_k >= 0, "0 (all) or more"),
            ("top-p", self.top_p, 0 < self.top_p <= 1, "more than 0 and at most 1"),
            ("min-p", self.min_p, 0 <= self.min_p <= 1, "0 to 1"),
            ("seed", self.seed, self.seed >= 0, "0 or more"),
        ):
            if not fits:
                raise UsageError(f"{name}: expected {expected}, got {value}")


class Sampler:
    """Chooses the tokens of one sequence."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._generator = np.random.Generator(np.random.PCG64(sampling.seed))

    def __call__(self, logits: npt.NDArray[np.floating]) -> int:
        """A token for logits [V]; ArtifactError when they are no numbers."""
        if self._sampling.temperature == 0:
            return greedy(logits)
        return draw(distribution(logits, self._sampling), self._generator)


def greedy(logits: npt.NDArray[np.floating]) -> int:
    """The token of the largest logit [V], the lowest of equals."""
    _require_numbers(logits)
    return int(np.argmax(logits))


def distribution(logits: npt.NDArray[np.floating], sampling: Sampling) -> Probabilities:
    """Probabilities f64 [V] of every token after the filters; at temperature 0 all of it on the greedy token."""
    if sampling.temperature == 0:
        certain = np.zeros(len(logits), np.float64)
        certain[greedy(logits)] = 1.0
        return certain
    _require_numbers(logits)
    # The maximum goes first: a tiny temperature then sends the others to −inf instead of the largest to +inf.
    with np.errstate(over="ignore"):
        weights = np.exp((logits.astype(np.float64) - float(np.max(logits))) / sampling.temperature)
    kept = _filtered(weights, sampling)
    probabilities = np.zeros_like(weights)
    probabilities[kept] = weights[kept] / weights[kept].sum()
    return probabilities


def _filtered(weights: Probabilities, sampling: Sampling) -> npt.NDArray[np.intp]:
    """Tokens that the filters leave, of weights [V] whose largest is 1."""
    tokens = np.arange(len(weights))
    if 0 < sampling.top_k < len(weights):
        # Sorting the few that can be among the k largest is much cheaper than sorting a vocabulary.
        tokens = np.flatnonzero(weights >= np.partition(weights, -sampling.top_k)[-sampling.top_k])
        tokens = tokens[np.argsort(-weights[tokens], kind="stable")[: sampling.top_k]]
    if sampling.top_p < 1:
        tokens = tokens[np.argsort(-weights[tokens], kind="stable")]
        share = np.cumsum(weights[tokens])
        tokens = tokens[: int(np.searchsorted(share, sampling.top_p * share[-1])) + 1]
    return tokens[weights[tokens] >= sampling.min_p]


def draw(probabilities: Probabilities, generator: np.random.Generator) -> int:
    """A token from probabilities [V], by inversion of one uniform number; tokens in ascending order."""
    share = np.cumsum(probabilities)
    token = int(np.searchsorted(share, generator.random() * share[-1], side="right"))
    # Rounding can put the product at the total itself; the last possible token owns that point.
    return min(token, int(np.flatnonzero(probabilities)[-1]))


@dataclass(frozen=True)
class Logprobs:
    """Log probability of a chosen token and of the most probable ones, in the distribution before any filter."""

    chosen: float
    top: tuple[tuple[int, float], ...]


def logprobs(logits: npt.NDArray[np.floating], token: int, count: int) -> Logprobs:
    """Of a token and of the `count` most probable ones, ties going to the lower token, for logits [V]."""
    wide = logits.astype(np.float64)
    scores = wide - np.max(wide)
    scores -= np.log(np.exp(scores).sum())
    most = np.argsort(-scores, kind="stable")[:count]
    return Logprobs(float(scores[token]), tuple((int(place), float(scores[place])) for place in most))


def _require_numbers(logits: npt.NDArray[np.floating]) -> None:
    if np.isfinite(np.max(logits)):  # the maximum is NaN when any logit is
        return
    strange = np.flatnonzero(~(logits < np.inf))
    place = int(strange[0]) if strange.size else 0
    raise ArtifactError(
        f"logits: expected numbers, got {logits[place]} for token {place}: the engine or its checkpoint is damaged"
    )
