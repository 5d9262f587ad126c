"""Drafting in batches: whatever is drafted, tokens, states and ends are those without drafts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runtime.fake_engine import BLOCK, CONTEXT, SLOTS, VOCABULARY, Built, write_engine
from v41c.errors import UsageError
from v41c.runtime.artifact import Engine, load
from v41c.runtime.batch import Batch
from v41c.runtime.generate import Generation
from v41c.runtime.profile import Profile
from v41c.runtime.request import Options, Request
from v41c.runtime.sampling import Sampling
from v41c.runtime.session import Draft, Session, Tokens

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
#: steps whose time does not depend on their tokens, so that every draft pays
FLAT = Profile("", "", [1], [1.0], [0.01], [[1.0] * (1 + BLOCK)])


class Oracle(Session):
    """A session that drafts what comes next by a table of continuations by prompt, spoilt after `right` drafts.

    With `times` they are its step times.
    """

    def __init__(self, engine: Engine, slots: int = 1, right: int = BLOCK, times: Profile | None = None) -> None:
        super().__init__(engine, slots=slots, drafting=True, poison=True)
        self.future: dict[int, Sequence[int]] = {}
        self.right = right
        self.confidence = np.full(BLOCK, 3.0, np.float32)
        self.drafted = 0
        self._known = times

    def times(self) -> Profile | None:
        """Those given."""
        return self._known

    def draft(self, tokens: Mapping[int, int], *, logits: bool = False) -> dict[int, Draft]:
        """What comes next in each slot, the drafts from place `right` on wrong."""
        assert self.drafting
        self.drafted += len(tokens)
        drafts = {}
        for slot, token in tokens.items():
            future = self.future[slot]
            place = self.length(slot)
            assert token == future[place]
            known = [*future[place + 1 : place + 1 + BLOCK], *[0] * BLOCK][:BLOCK]
            wrong = [(t + (j >= self.right)) % VOCABULARY for j, t in enumerate(known)]
            drafts[slot] = Draft(np.array(wrong, np.int32), self.confidence, np.empty((0, VOCABULARY), np.float32))
        return drafts


def plain(engine: Engine, prompt: Tokens, options: Options) -> tuple[Generation, Session]:
    """What a request gets without drafts, in a session whose draft head's context is kept up."""
    session = Session(engine, drafting=True, poison=True)
    generation = Generation(session, prompt, replace(options, draft="off"))
    list(generation)
    return generation, session


def continuation(engine: Engine, prompt: Sequence[int], options: Options) -> list[int]:
    """The prompt and everything that would follow, stop or no stop."""
    endless = Options(CONTEXT - len(prompt) + 1, options.sampling, options.mode, draft="off")
    return [*prompt, *plain(engine, prompt, endless)[0].result.tokens]


def assert_alike(ours: Session, theirs: Session) -> None:
    assert ours.length() == theirs.length()
    for name, array in theirs.states.items():
        np.testing.assert_array_equal(ours.states[name][0], array[0], err_msg=name)


@pytest.mark.parametrize("right", range(BLOCK + 1))
@pytest.mark.parametrize("length", range(1, BLOCK + 1))
def test_rejections_at_every_place_leave_no_trace(engine: Engine, length: int, right: int) -> None:
    for count in (1, 2, 4, 7):
        options = Options(count, mode="full", draft=length)
        wanted, theirs = plain(engine, PROMPT, options)
        session = Oracle(engine, right=right)
        session.future[0] = continuation(engine, PROMPT, options)
        generation = Generation(session, PROMPT, options)
        assert [piece.token for piece in generation] == wanted.result.tokens
        assert_alike(session, theirs)
        report = generation.result.drafts
        if count > 1:
            assert report is not None
            assert report.tokens == generation.result.decode_tokens == count - 1
            # in the last step no more is drafted than there are tokens left
            whole, rest = divmod(count - 1, 1 + min(right, length))
            assert report.steps == whole + (rest > 0)


@settings(max_examples=60, deadline=None)
@given(
    prompt=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=CONTEXT),
    count=st.integers(1, 20),
    sampling=st.builds(Sampling, temperature=st.sampled_from([0.0, 40.0]), seed=st.integers(0, 9)),
    stops=st.lists(st.integers(0, VOCABULARY - 1), max_size=3),
    draft=st.integers(1, BLOCK),
    right=st.integers(0, BLOCK),
    mode=st.sampled_from(["ced", "full"]),
)
def test_stops_and_limits_within_drafts_are_respected(
    engine: Engine,
    prompt: list[int],
    count: int,
    sampling: Sampling,
    stops: list[int],
    draft: int,
    right: int,
    mode: str,
) -> None:
    options = Options(count, sampling, mode, stop_tokens=tuple(stops), draft=draft)
    wanted, theirs = plain(engine, prompt, options)
    session = Oracle(engine, right=right)
    session.future[0] = continuation(engine, prompt, options)
    generation = Generation(session, prompt, options)
    assert [piece.token for piece in generation] == wanted.result.tokens
    assert (generation.result.stop, generation.result.text) == (wanted.result.stop, wanted.result.text)
    assert generation.result.decode_tokens == wanted.result.decode_tokens
    assert_alike(session, theirs)


requests_of = st.lists(
    st.tuples(
        st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=20),
        st.builds(
            Options,
            st.integers(0, 12),
            st.builds(Sampling, temperature=st.sampled_from([0.0, 40.0]), seed=st.integers(0, 9)),
            mode=st.sampled_from(["ced", "full"]),
            draft=st.sampled_from(["off", "auto", 1, 2, BLOCK]),
        ),
        st.integers(0, 4),
    ),
    max_size=7,
)


@settings(max_examples=40, deadline=None)
@given(asked=requests_of, slots=st.integers(1, SLOTS), budget=st.integers(SLOTS, 8))
def test_sequences_that_draft_share_steps_with_any_others(
    engine: Engine, asked: list[tuple[list[int], Options, int]], slots: int, budget: int
) -> None:
    session = Session(engine, slots=slots, drafting=True, poison=True)
    batch = Batch(session, token_budget=budget)
    requests = []
    for prompt, options, steps_before in asked:
        for _ in range(steps_before):
            batch.step()
        requests.append(Request(prompt, options))
        batch.add(requests[-1])
    while not batch.idle:
        assert batch.step()
    for request, (prompt, options, _) in zip(requests, asked, strict=True):
        assert request.error is None
        assert request.result.tokens == plain(engine, prompt, options)[0].result.tokens


def test_prompts_are_not_starved_by_drafts(engine: Engine) -> None:
    session = Oracle(engine, slots=2)
    batch = Batch(session, token_budget=4)
    first, second = Request(PROMPT, Options(30, mode="full", draft=BLOCK)), Request(PROMPT, Options(1, mode="full"))
    session.future[1] = session.future[0] = continuation(engine, PROMPT, first.options)
    batch.add(first)
    for _ in range(3):
        batch.step()
    batch.add(second)
    steps = 0
    while not second.done:
        batch.step()
        steps += 1
    # a token and one draft leave two of the four for the prompt of eight
    assert steps == 4
    assert not first.done


def test_auto_verifies_more_of_surer_drafts(engine: Engine) -> None:
    session = Oracle(engine, times=FLAT)
    session.future[0] = continuation(engine, PROMPT, Options(1, mode="full"))
    session.confidence = np.array([3.0, 3.0, -9.0], np.float32)
    # a third draft that is all but hopeless costs as little as it promises
    steep = replace_row(FLAT, [1.0, 1.0, 1.0, 1.5])
    session._known = steep
    generation = Generation(session, PROMPT, Options(19, mode="full", draft="auto"))
    list(generation)
    report = generation.result.drafts
    assert report is not None
    # four steps that draft, two to see what plain ones take, one that drafts, and one for the last token
    assert report.lengths == [3, 0, 5, 0]
    assert report.tokens_per_step == 18 / 8
    assert session.drafted == 5


def replace_row(profile: Profile, row: list[float]) -> Profile:
    return Profile("", "", profile.batches, profile.plain_seconds, profile.draft_seconds, [row])


def test_auto_leaves_drafting_where_it_does_not_pay(engine: Engine) -> None:
    session = Oracle(engine, times=replace_row(FLAT, [1.0, 2.0, 3.0, 4.0]))
    generation = Generation(session, PROMPT, Options(19, mode="full", draft="auto"))
    list(generation)
    report = generation.result.drafts
    assert report is not None
    assert (report.steps, report.lengths) == (18, [18, 0, 0, 0])
    assert (session.drafted, session.drafting) == (0, False)
    assert session.evaluated["draft_context"] == 0


def test_auto_measures_an_empty_session_only(engine: Engine, built: Built, tmp_path: Path) -> None:
    engine = load(write_engine(built, tmp_path / "toy"))
    session = Session(engine, drafting=True)
    session.prefill(PROMPT, mode="full")
    generation = Generation(session, [1], Options(5, mode="full", draft="auto"))
    list(generation)
    assert generation.result.drafts is None
    assert [path.name for path in tmp_path.iterdir()] == ["toy"]
    session.reset()
    generation = Generation(session, [1], Options(5, mode="full", draft="auto"))
    list(generation)
    assert generation.result.drafts is not None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["toy", "toy.profile.json"]


def test_numbers_of_drafts_are_checked(engine: Engine, built: Built, tmp_path: Path) -> None:
    bare = Session(load(write_engine(built, tmp_path / "plain", graphs=["encoder", "decoder"])))
    for choice in ("auto", "off"):
        tokens = [piece.token for piece in Generation(bare, PROMPT, Options(3, mode="full", draft=choice))]
        assert tokens == plain(engine, PROMPT, Options(3, mode="full"))[0].result.tokens
        bare.reset()
    with pytest.raises(UsageError, match="draft: expected auto or off, got 2: this engine has no draft head"):
        Batch(bare).add(Request(PROMPT, Options(3, draft=2)))
    with pytest.raises(UsageError, match="draft: expected at most 3 tokens, what the draft head gives, got 4"):
        Batch(Session(engine, drafting=True)).add(Request(PROMPT, Options(3, draft=4)))
    with pytest.raises(UsageError, match="draft: open the session with drafting=True"):
        Batch(Session(engine)).add(Request(PROMPT, Options(3, draft=2)))
    for bad in (0, -1, "fast"):
        with pytest.raises(UsageError, match=f"draft: expected auto, off or a number of tokens, got {bad}"):
            Options(3, draft=bad)
