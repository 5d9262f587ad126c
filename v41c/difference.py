"""Differences between an engine and the eager model, as figures: streams, integers, logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from v41c.subject import INTEGERS, Array
from v41c.verdict import relative_l2


@dataclass(frozen=True)
class Error:
    """How far a tensor is from the eager model's: largest and mean absolute difference, and relative L2."""

    max_abs: float
    mean_abs: float
    relative_l2: float


@dataclass(frozen=True)
class TensorRow:
    """A stream of a layer. `floor`: the eager model against itself with another grouping of the tokens."""

    name: str
    engine: Error
    floor: Error


@dataclass(frozen=True)
class IntegerRow:
    """Integers of a layer: of `rows` tokens, how many have equal ones in the engine, and in the noise floor."""

    name: str
    rows: int
    engine: int
    floor: int


@dataclass(frozen=True)
class LogitsRow:
    """Logits over the tokens of a phase: error, mean Kullback-Leibler divergence in nats, top-1 agreement."""

    error: Error
    kl_nats: float
    top1_agreement: float


@dataclass(frozen=True)
class Phase:
    """One way of feeding the tokens, compared: every layer, and the logits where the phase has its own."""

    name: str
    tokens: int
    tensors: list[TensorRow]
    integers: list[IntegerRow]
    logits: LogitsRow | None
    logits_floor: LogitsRow | None


@dataclass(frozen=True)
class DivergenceRow:
    """How far the distributions over tokens of `subject` are from those of the model as its checkpoint stores it.

    `kl_nats`: KL(model ‖ subject) after each token of the phase; `top1_agreement`: share of equal most likely tokens.
    """

    phase: str
    subject: str
    kl_nats: list[float]
    top1_agreement: float


@dataclass(frozen=True)
class CedRow:
    """The `ced` prefill of the engine against its own `full` one, and the tokens that are decoded after each."""

    prompt_tokens: int
    prefill: LogitsRow
    decode: LogitsRow


def compare_phase(
    name: str, found: Mapping[str, Array], wanted: Mapping[str, Array], floor: Mapping[str, Array]
) -> Phase:
    tensors, integers = [], []
    for landmark, rows in wanted.items():
        if landmark == "logits" or landmark not in found:
            continue
        if landmark.rpartition(".")[2] in INTEGERS:
            equal = (int(np.all(other[landmark] == rows, axis=-1).sum()) for other in (found, floor))
            integers.append(IntegerRow(landmark, len(rows), *equal))
        else:
            tensors.append(TensorRow(landmark, error(found[landmark], rows), error(floor[landmark], rows)))
    both = [logits_row(other["logits"], wanted["logits"]) if "logits" in found else None for other in (found, floor)]
    return Phase(name, len(next(iter(wanted.values()))), tensors, integers, *both)


def error(found: Array, wanted: Array) -> Error:
    """Of tensors of equal shape."""
    difference = np.abs(found.astype(np.float64) - wanted)
    return Error(float(difference.max()), float(difference.mean()), relative_l2(found, wanted))


def logits_row(found: Array, wanted: Array) -> LogitsRow:
    """Of logits [T, V]."""
    agreement = float((found.argmax(1) == wanted.argmax(1)).mean())
    return LogitsRow(error(found, wanted), float(divergence(found, wanted).mean()), agreement)


def divergence_row(phase: str, subject: str, found: Array, wanted: Array) -> DivergenceRow:
    """Of logits [T, V]."""
    agreement = logits_row(found, wanted).top1_agreement
    return DivergenceRow(phase, subject, divergence(found, wanted).tolist(), agreement)


def divergence(found: Array, wanted: Array) -> Array:
    """KL(wanted ‖ found) in nats of the distributions that logits [T, V] stand for: f64 [T]."""
    p, q = (_log_softmax(logits.astype(np.float64)) for logits in (wanted, found))
    total: Array = (np.exp(p) * (p - q)).sum(1)
    return total


def _log_softmax(logits: Array) -> Array:
    shifted = logits - logits.max(1, keepdims=True)
    result: Array = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    return result
