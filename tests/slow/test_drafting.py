"""Every number of drafts, one sequence and eight: 50 long continuations of the trained model are those without."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.test_drafting import results
from v41c.frontend.presets import TRAINED_CHECKPOINT
from v41c.runtime.artifact import Engine, load
from v41c.runtime.drafting import added_up
from v41c.runtime.generate import Generation
from v41c.runtime.request import Options, Result
from v41c.runtime.sampling import Sampling
from v41c.runtime.session import Session

COUNT, TOKENS = 50, 200


@pytest.fixture(scope="module")
def engine(engine_of: Callable[..., Path]) -> Engine:
    """The trained model's."""
    return load(engine_of(TRAINED_CHECKPOINT))


@pytest.fixture(scope="module")
def prompts(engine: Engine) -> list[list[int]]:
    """Beginnings of 3 to 52 tokens, drawn from the model itself."""
    begin = engine.manifest.bos_token
    assert begin is not None
    found = []
    for number in range(COUNT):
        options = Options(2 + number, Sampling(temperature=1.0, seed=number))
        generation = Generation(Session(engine), [begin], options)
        found.append([begin, *(piece.token for piece in generation if piece.token is not None)])
    return found


@pytest.fixture(scope="module")
def plain(engine: Engine, prompts: list[list[int]]) -> list[Result]:
    """Their continuations without drafts."""
    return results(engine, prompts, Options(TOKENS), 1)


@pytest.mark.parametrize("slots", [1, 8])
@pytest.mark.parametrize("draft", [1, 2, 3, 4, 5, "auto"])
def test_long_continuations_are_those_without_drafts(
    engine: Engine, prompts: list[list[int]], plain: list[Result], draft: int | str, slots: int
) -> None:
    found = results(engine, prompts, replace(Options(TOKENS), draft=draft), slots)
    for ours, theirs in zip(found, plain, strict=True):
        assert (ours.tokens, ours.stop) == (theirs.tokens, theirs.stop)
    report = added_up(result.drafts for result in found)
    assert report is not None
    print(f"draft {draft}, {slots} at once: {report.summary()}; calibration {report.calibration}")
