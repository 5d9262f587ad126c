"""Whole engines on a GPU: they meet the golden tensors, generate what others generate, and replay what they launch."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from v41c.compare import compare
from v41c.compile import CompileOptions, compile
from v41c.frontend.presets import TRAINED_CHECKPOINT
from v41c.manifest import MANIFEST_FILE
from v41c.runtime.artifact import load
from v41c.runtime.cuda import RECORDED_TOKENS
from v41c.runtime.cuda_driver import CudaDriver
from v41c.runtime.session import Session
from v41c.subject import Arithmetic, Array, EagerSubject, EngineSubject, Subject, unseen
from v41c.targets.cuda import CudaTarget

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
CASES = sorted(folder.name for folder in GOLDEN.glob("case_*"))
CONTEXT = 512
PROMPT = (0, 5, 17, 300, 41, 99, 1200, 8, 640, 77, 3)
EngineFor = Callable[[Path, Arithmetic], Path]


@pytest.fixture(scope="session")
def cuda_engine(target: CudaTarget, tmp_path_factory: pytest.TempPathFactory) -> EngineFor:
    """Engines for the GPU by checkpoint folder and arithmetic, compiled when first asked for."""
    folder = tmp_path_factory.mktemp("engines")

    def engine(checkpoint: Path, arithmetic: Arithmetic) -> Path:
        path = folder / f"{checkpoint.name}-{arithmetic}"
        if not (path / MANIFEST_FILE).is_file():
            compile(checkpoint, path, CompileOptions(target=target.name, arithmetic=arithmetic, max_context=CONTEXT))
        return path

    return engine


def test_the_trained_model_meets_its_golden_prompts(cuda_engine: EngineFor) -> None:
    """Every greedy token is the golden one wherever the golden logits are not about to tie."""
    report = compare(cuda_engine(TRAINED_CHECKPOINT, "release"), golden=GOLDEN / "tiny-v41-golden")
    assert report.passed, report.summary()
    greedy = [v for v in report.verdicts if v.kind == "greedy tokens" and v.subject.startswith("engine")]
    assert [(v.figure, v.compared) for v in greedy] == [(0.0, 31), (0.0, 32)]


@pytest.mark.parametrize("other", ["eager model", "CPU engine"])
def test_greedy_tokens_are_those_of(other: str, cuda_engine: EngineFor, tmp_path: Path) -> None:
    """In exact arithmetic, where nothing but the order of sums differs."""
    ours = EngineSubject(load(cuda_engine(TRAINED_CHECKPOINT, "exact")))
    if other == "eager model":
        theirs: Subject = EagerSubject.of_checkpoint(TRAINED_CHECKPOINT, "exact")
    elif importlib.util.find_spec("tvm") is None:
        pytest.skip("tvm: expected the package apache-tvm, which compiles CPU engines")
    else:
        compile(TRAINED_CHECKPOINT, tmp_path / "cpu", CompileOptions(arithmetic="exact", max_context=CONTEXT))
        theirs = EngineSubject(load(tmp_path / "cpu"))
    assert greedy(ours, 48) == greedy(theirs, 48)


def greedy(subject: Subject, count: int) -> list[int]:
    """The most likely tokens after the prompt, each fed in turn."""
    subject.start(len(PROMPT) + count)
    tokens = [int(subject.feed(np.array(PROMPT), unseen)[-1].argmax())]
    while len(tokens) < count:
        tokens.append(int(subject.decode(tokens[-1], unseen).argmax()))
    return tokens


@pytest.mark.parametrize("arithmetic", ["exact", "release"])
def test_replayed_steps_are_the_launched_ones(arithmetic: Arithmetic, cuda_engine: EngineFor) -> None:
    """To the bit: a session that watches every value launches kernels one by one, one that does not replays graphs."""
    path = cuda_engine(TRAINED_CHECKPOINT, arithmetic)
    watched: list[str] = []
    launched = steps(Session(load(path), drafting=True, poison=True, observe=lambda seen: watched.append(seen.name)))
    assert watched
    for ours, theirs in zip(steps(Session(load(path), drafting=True, poison=True)), launched, strict=True):
        assert np.array_equal(ours.view(np.uint32), theirs.view(np.uint32))


@pytest.mark.parametrize("watched", [False, True])
def test_tables_in_host_memory_change_nothing(
    watched: bool, cuda_engine: EngineFor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit: their rows are looked up aside, launched and recorded; or in order, where every value is watched."""
    path = cuda_engine(TRAINED_CHECKPOINT, "release")
    near = steps(Session(load(path), drafting=True, poison=True))
    monkeypatch.setattr(CudaDriver, "free_bytes", property(lambda self: 0))
    seen = (lambda observation: None) if watched else None
    for ours, theirs in zip(near, steps(Session(load(path), drafting=True, poison=True, observe=seen)), strict=True):
        assert np.array_equal(ours.view(np.uint32), theirs.view(np.uint32))


def steps(session: Session) -> list[Array]:
    """Logits of a long prompt, a short one after it, single tokens and drafts; recordings are replayed again."""
    made = [session.prefill_all(np.arange(5, 105), mode="full"), session.prefill_all(np.array(PROMPT[1:]))]
    assert len(PROMPT) <= RECORDED_TOKENS
    for token in (7, 8, 9, 7):
        made += [session.decode(token), session.draft({0: token}, logits=True)[0].logits]
    session.reset()
    return [*made, session.prefill(np.arange(5, 105)), session.decode(7)]


def test_a_sequence_does_not_depend_on_what_ran_before(cuda_engine: EngineFor) -> None:
    """To the bit: a fresh session, and one that another text went through; no result hangs on timing."""
    path = cuda_engine(TRAINED_CHECKPOINT, "release")
    fresh, used = Session(load(path), poison=True), Session(load(path), poison=True)
    used.prefill(np.arange(900, 1100))
    used.reset()
    for session_tokens in (np.arange(5, 205), np.array(PROMPT)):
        assert np.array_equal(fresh.prefill(session_tokens), used.prefill(session_tokens))


@pytest.mark.parametrize("arithmetic", ["exact", "release"])
@pytest.mark.parametrize("case", CASES)
def test_engines_meet_the_criteria(case: str, arithmetic: Arithmetic, cuda_engine: EngineFor) -> None:
    report = compare(cuda_engine(GOLDEN / case, arithmetic), golden=GOLDEN / case)
    assert report.passed, report.summary()
    assert [v for v in report.verdicts if v.passed is None or v.note] == []
