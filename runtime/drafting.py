"""Speculative decoding: how far to trust the draft head, how many drafts to verify, which of them the model keeps.

DeepSeek-V4.1 report, section 2.4.3 (DSpark). A step of a sequence feeds its last token and L drafts as one chunk; the
model's own choice after each of them says how many drafts it would have made itself, and gives one token more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Doubles = npt.NDArray[np.float64]
#: bins of the calibration of confidences
_BINS = 10


def survival(confidence: npt.NDArray[np.floating]) -> Doubles:
    """Probability f64 [B] that each draft and all before it are accepted, from confidence logits [B].

    S_j = Π_{i≤j} sigmoid(confidence_i). NaN, which a damaged head gives, counts as no confidence.
    """
    logits = np.nan_to_num(confidence.astype(np.float64), nan=-np.inf)
    conditional = np.exp(-np.logaddexp(0.0, -logits))
    return np.cumprod(conditional, dtype=np.float64)


def choose_lengths(survivals: Mapping[int, Doubles], seconds: Doubles) -> dict[int, int]:
    """How many drafts of each sequence to verify, so that the batch makes the most tokens per second.

    `survivals`: survival of the drafts that a sequence may verify, f64, by slot. `seconds` f64 [1 + K]: times of steps
    that verify 0 … K drafts in all. Maximises (sequences + Σ of the chosen survivals) / seconds[their number].
    Survival does not rise from draft to draft, so that the k largest of all are the first ones of each sequence, and no
    other k drafts give more. The fewest drafts of equal merit.
    """
    owners = np.repeat(list(survivals), [len(values) for values in survivals.values()])
    values = np.concatenate([*survivals.values(), np.empty(0)])
    order = np.argsort(-values, kind="stable")[: len(seconds) - 1]
    tokens = len(survivals) + np.concatenate([[0.0], np.cumsum(values[order])])
    count = int(np.argmax(tokens / seconds[: len(tokens)]))
    chosen = owners[order[:count]].tolist()
    return {slot: chosen.count(slot) for slot in survivals}


def accept(
    logits: npt.NDArray[np.floating],
    drafts: Sequence[int],
    choose: Callable[[npt.NDArray[np.floating]], int | None],
) -> int:
    """How many of the drafts L of a sequence are accepted, by what is chosen after its last token and each of them.

    `logits` [1 + L, V]. `choose` takes a row and gives the next token, None when the sequence is over with it. It is
    asked once more than drafts are accepted. Greedy: the accepted drafts are the longest prefix that equals the model's
    own choices.

    With a temperature this is rejection sampling (Leviathan et al. 2023, arXiv:2211.17192). The draft head proposes
    the likeliest token of its chain: its distribution q is all on one token d, and a draft is accepted with probability
    min(1, p(d)/q(d)) = p(d), else replaced by a token of max(0, p − q) renormalised, which is p without d. A token x
    drawn from p does both at once: it is d with probability p(d), and any other token with its share of p. p is the
    model's distribution after temperature and filters. So the tokens are distributed as without drafting; and as one
    number is drawn for each, they are the same tokens for the same seed.
    """
    for place, draft in enumerate(drafts):
        if choose(logits[place]) != draft:
            return place
    choose(logits[len(drafts)])
    return len(drafts)


@dataclass
class DraftReport:
    """What drafting did to a sequence, or to several of them added up.

    steps: that decoded the sequence, with drafts or without; tokens: that they made. lengths[L]: steps that verified L
    drafts. verified[j], accepted[j]: how often the draft at place j was put to the test, all before it having been
    accepted, and passed. confidence: of these tests, by tenths of the head's probability: how many, the sum of the
    probabilities, how many passed.
    """

    block: int
    steps: int = 0
    tokens: int = 0
    lengths: list[int] = field(default_factory=list)
    verified: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    confidence: list[tuple[int, float, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Empty counts of the right number."""
        self.lengths = self.lengths or [0] * (self.block + 1)
        self.verified = self.verified or [0] * self.block
        self.accepted = self.accepted or [0] * self.block
        self.confidence = self.confidence or [(0, 0.0, 0)] * _BINS

    def count(self, survived: Doubles, accepted: int) -> None:
        """A step that verified the drafts with these survivals f64 [L] and accepted so many of them."""
        self.steps += 1
        self.tokens += accepted + 1
        self.lengths[len(survived)] += 1
        if not len(survived):
            return
        before = 1.0
        for place, value in enumerate(survived[: accepted + 1].tolist()):
            passed = place < accepted
            self.verified[place] += 1
            self.accepted[place] += passed
            conditional = value / before if before else 0.0
            number = min(int(conditional * _BINS), _BINS - 1)
            tests, total, passes = self.confidence[number]
            self.confidence[number] = (tests + 1, total + conditional, passes + passed)
            before = value

    def add(self, other: DraftReport) -> None:
        """Count what another sequence's report counts."""
        self.steps += other.steps
        self.tokens += other.tokens
        for mine, theirs in (
            (self.lengths, other.lengths),
            (self.verified, other.verified),
            (self.accepted, other.accepted),
        ):
            mine[:] = [a + b for a, b in zip(mine, theirs, strict=True)]
        pairs = zip(self.confidence, other.confidence, strict=True)
        self.confidence = [(a[0] + b[0], a[1] + b[1], a[2] + b[2]) for a, b in pairs]

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a step made of the sequence; 0 before the first."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def acceptance(self) -> list[float | None]:
        """Share of drafts accepted by place, of those whose predecessors were; None where none was verified."""
        pairs = zip(self.accepted, self.verified, strict=True)
        return [passed / tests if tests else None for passed, tests in pairs]

    @property
    def calibration(self) -> list[tuple[float, float, int]]:
        """Mean probability that the head gave, share accepted, and tests, for each tenth that has any."""
        return [(total / tests, passes / tests, tests) for tests, total, passes in self.confidence if tests]

    def to_json(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        return {
            "steps": self.steps,
            "tokens_per_step": self.tokens_per_step,
            "lengths": self.lengths,
            "verified": self.verified,
            "accepted": self.accepted,
            "acceptance": self.acceptance,
            "calibration": [
                {"mean_probability": mean, "accepted": share, "drafts": tests}
                for mean, share, tests in self.calibration
            ],
        }

    def summary(self) -> str:
        """Tokens per step, acceptance by place and how often each length was verified, in one line."""
        shares = " ".join("-" if share is None else f"{share:.0%}" for share in self.acceptance)
        lengths = ", ".join(f"{length}: {count}" for length, count in enumerate(self.lengths) if count)
        return f"drafts: {self.tokens_per_step:.2f} tokens a step; accepted by place {shares}; verified {lengths}"


def added_up(reports: Iterable[DraftReport | None]) -> DraftReport | None:
    """Reports of several sequences as one; None when there is none."""
    total: DraftReport | None = None
    for report in reports:
        if report is not None:
            total = total or DraftReport(report.block)
            total.add(report)
    return total
