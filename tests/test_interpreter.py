"""The interpreter on the traced graphs is the eager model, bit for bit, in both arithmetics."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.traced import CASES, FOLDERS, GOLDEN, traced, traced_in
from v41c.criteria import judge
from v41c.errors import VerifyError
from v41c.frontend import load
from v41c.golden import read_golden
from v41c.interpreted import InterpretedSubject
from v41c.ir.interpret import interpret
from v41c.ir.text import parse_module, print_module
from v41c.subject import Arithmetic, EagerSubject, Notes, Subject

# more than a window of one case, single tokens at odd and even positions, and more of both
CHUNKS = (19, 1, 14, 1)


def tokens_of(config_size: int, count: int) -> np.ndarray:
    return np.random.default_rng(5).integers(5, config_size - 4, count)


def fed(subject: Subject, tokens: np.ndarray) -> list[dict[str, np.ndarray]]:
    """Landmarks, logits and drafts of each chunk."""
    subject.start(len(tokens) + 1)
    steps, begin = [], 0
    for count in CHUNKS:
        notes = Notes()
        logits = subject.feed(tokens[begin : begin + count], notes)
        values = dict(notes.values) | {"step logits": logits}
        begin += count
        if subject.config.has_draft:
            notes = Notes()
            block = subject.draft(int(tokens[begin % len(tokens)]), notes)
            values |= {f"draft {name}": rows for name, rows in notes.values.items()}
            values |= {"drafts": block.drafts, "draft logits": block.logits, "confidence": block.confidence}
        steps.append(values)
    return steps


@pytest.mark.parametrize("arithmetic", ["release", "exact"])
@pytest.mark.parametrize("case", FOLDERS)
def test_every_landmark_and_state_is_the_eager_models(case: str, arithmetic: Arithmetic) -> None:
    source, module = traced_in(case, arithmetic)
    interpreted = InterpretedSubject(source, module, arithmetic)
    eager = EagerSubject(load(str(FOLDERS[case]), arithmetic))
    tokens = tokens_of(source.config.vocab_size, sum(CHUNKS))
    for found, wanted in zip(fed(interpreted, tokens), fed(eager, tokens), strict=True):
        missing = wanted.keys() - found.keys()
        # the tracer names a value once: what enters a layer without an Engram is what left the layer below
        assert all(name.endswith(".in") for name in missing)
        for name in wanted.keys() - missing:
            np.testing.assert_array_equal(found[name], wanted[name], name)
    assert interpreted.states.keys() == eager.states.keys()
    for name, state in eager.states.items():
        ours = interpreted.states[name]
        written = ours[:, : state.shape[1]]
        assert written.dtype == state.dtype
        # what was never written is zero in the eager model and NaN here
        fresh = (written != written) if written.is_floating_point() else written == 255
        assert ((written == state) | (fresh & (state == 0))).all(), name


@pytest.mark.parametrize("case", CASES)
def test_the_interpreter_meets_the_exact_criterion(case: str) -> None:
    source, module = traced_in(case, "exact")
    subject = InterpretedSubject(source, module, "exact")
    for run in read_golden(GOLDEN / case, source.config, "exact"):
        verdicts = judge(subject, run)
        assert all(verdict.passed for verdict in verdicts), verdicts


def test_a_printed_module_computes_the_same() -> None:
    source, module = traced("case_02")
    again = parse_module(print_module(module))
    tokens = tokens_of(source.config.vocab_size, sum(CHUNKS))
    subjects = [InterpretedSubject(source, m, "release") for m in (module, again)]
    for left, right in zip(*(fed(subject, tokens) for subject in subjects), strict=True):
        assert left.keys() == right.keys()
        for name in left:
            np.testing.assert_array_equal(left[name], right[name])


def test_given_states_are_left_untouched() -> None:
    source, module = traced("case_02")
    subject = InterpretedSubject(source, module, "release")
    subject.start(8)
    before = {name: state.clone() for name, state in subject.states.items()}
    given = dict(subject.states)
    subject.feed(np.arange(5, 9), Notes())
    for name, state in given.items():
        assert torch.equal(state.view(torch.uint8), before[name].view(torch.uint8)), name


def test_a_missing_input_is_named() -> None:
    _, module = traced("case_02")
    with pytest.raises(VerifyError, match="graph model: tokens: expected a tensor, got none"):
        interpret(module["model"], {}, lambda value: torch.empty(0), {})


def test_no_path_of_this_machine_is_in_the_text() -> None:
    _, module = traced("case_00")
    assert str(Path.cwd()) not in print_module(module)
