"""Drafts of the trained model: the same tokens with any number of them, and a head that knows what it promises."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from v41c.frontend.presets import TRAINED_CHECKPOINT
from v41c.runtime.artifact import Engine, load
from v41c.runtime.batch import Batch
from v41c.runtime.drafting import added_up
from v41c.runtime.request import Options, Request, Result
from v41c.runtime.sampling import Sampling
from v41c.runtime.session import Session
from v41c.runtime.text import Text

PROMPTS = ("And it came to pass,", "The LORD is my", "Blessed are they that", "And God said,")


@pytest.fixture(scope="module")
def engine(engine_of: Callable[..., Path]) -> Engine:
    """The trained model's."""
    return load(engine_of(TRAINED_CHECKPOINT))


def results(engine: Engine, prompts: Sequence[Sequence[int]], options: Options, slots: int) -> list[Result]:
    """Continuations of the prompts, up to `slots` at once."""
    batch = Batch(Session(engine, slots=slots, drafting=options.draft != "off"))
    requests = [Request(prompt, options) for prompt in prompts]
    for request in requests:
        batch.add(request)
    while not batch.idle:
        batch.step()
    return [request.result for request in requests]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_tokens_are_those_without_drafts(engine: Engine, temperature: float) -> None:
    text = Text(engine)
    prompts = [text.encode(prompt) for prompt in PROMPTS]
    options = Options(30, Sampling(temperature=temperature, top_p=0.95, seed=3))
    wanted = [result.tokens for result in results(engine, prompts, options, 1)]
    for draft, slots in ((1, 1), (2, 4), (3, 2), (4, 3), (5, 1), ("auto", 4)):
        found = results(engine, prompts, replace(options, draft=draft), slots)
        assert [result.tokens for result in found] == wanted
        report = added_up(result.drafts for result in found)
        assert report is not None
        assert report.tokens == len(PROMPTS) * 29
        if draft == 5 and not temperature:
            # trained to 2.5 tokens a step on text it has not seen
            assert report.tokens_per_step > 1.8


def test_sequences_that_draft_together_draft_as_if_alone(engine: Engine) -> None:
    text = Text(engine)
    session = Session(engine, slots=len(PROMPTS), drafting=True, poison=True)
    last = {}
    for slot, prompt in enumerate(PROMPTS):
        *tokens, last[slot] = text.encode(prompt * (1 + 4 * slot))
        session.prefill(tokens, slot=slot)
    together = session.draft(last, logits=True)
    for slot, token in last.items():
        alone = session.draft({slot: token}, logits=True)[slot]
        np.testing.assert_array_equal(together[slot].drafts, alone.drafts)
        np.testing.assert_array_equal(together[slot].logits, alone.logits)
        np.testing.assert_array_equal(together[slot].confidence, alone.confidence)
    assert len({tuple(draft.drafts.tolist()) for draft in together.values()}) > 1


def test_what_the_head_is_surer_of_is_accepted_more_often(engine: Engine) -> None:
    text = Text(engine)
    prompts = [text.encode(prompt) for prompt in PROMPTS]
    report = added_up(result.drafts for result in results(engine, prompts, Options(60, draft=5), 4))
    assert report is not None
    tests, promised, passed = np.array(report.confidence).T
    unsure, sure = slice(0, 5), slice(5, 10)
    shares = [passed[part].sum() / tests[part].sum() for part in (unsure, sure)]
    assert shares[0] + 0.1 < shares[1]
    assert abs(promised.sum() - passed.sum()) < 0.25 * tests.sum()
