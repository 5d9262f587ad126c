"""Batches: whatever shares its steps, a sequence gets the tokens it would get alone; errors stay where they arise."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.runtime.fake_engine import CONTEXT, SLOTS, VOCABULARY, Built, write_engine
from v41c.errors import ArtifactError, ContextError, UsageError
from v41c.runtime.artifact import Engine, load
from v41c.runtime.batch import Batch
from v41c.runtime.device import Observation
from v41c.runtime.generate import Generation
from v41c.runtime.prefix_store import PrefixStore
from v41c.runtime.request import Options, Piece, Request
from v41c.runtime.reuse import Reuse, Reused
from v41c.runtime.sampling import Sampling
from v41c.runtime.session import Session, Tokens
from v41c.runtime.steps import Floats, Part
from v41c.runtime.text import StopStrings, Text

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
SHIPPED = Path(__file__).parents[2] / "v41c/data/tiny-v41/tokenizer.json"


def alone(engine: Engine, prompt: Sequence[int], options: Options) -> list[int]:
    """Tokens that a request gets in a session of its own."""
    generation = Generation(Session(engine, poison=True), prompt, options)
    return [piece.token for piece in generation if piece.token is not None]


def finish(batch: Batch, *requests: Request) -> None:
    """Step until nothing is left; every request must have come to its end."""
    while not batch.idle:
        assert batch.step()
    assert all(request.done for request in requests)


requests_of = st.lists(
    st.tuples(
        st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=CONTEXT),
        st.builds(
            Options,
            st.integers(0, 12),
            st.builds(Sampling, temperature=st.sampled_from([0.0, 40.0]), seed=st.integers(0, 9)),
            mode=st.sampled_from(["ced", "full"]),
            chunk=st.sampled_from([None, 1, 3]),
        ),
        st.integers(0, 4),
    ),
    max_size=8,
)


@settings(max_examples=40, deadline=None)
@given(asked=requests_of, slots=st.integers(1, SLOTS), budget=st.integers(SLOTS, 8))
def test_sequences_in_a_batch_are_as_if_alone(
    engine: Engine, asked: list[tuple[list[int], Options, int]], slots: int, budget: int
) -> None:
    batch = Batch(Session(engine, slots=slots, poison=True), token_budget=budget)
    requests = []
    for prompt, options, steps_before in asked:
        for _ in range(steps_before):
            batch.step()
        requests.append(Request(prompt, options))
        batch.add(requests[-1])
    finish(batch, *requests)
    for request, (prompt, options, _) in zip(requests, asked, strict=True):
        assert request.error is None
        assert request.result.tokens == alone(engine, prompt, options)


def test_events_are_the_pieces_of_a_generation(engine: Engine) -> None:
    options = Options(6, mode="full")
    batch, request = Batch(Session(engine)), Request(PROMPT, options)
    batch.add(request)
    pieces: list[Piece] = []
    while not batch.idle:
        for event in batch.step():
            assert event.request is request
            pieces += event.pieces
    assert pieces == list(Generation(Session(engine), PROMPT, options))
    result = request.result
    assert (result.stop, result.prompt_tokens, result.decode_steps) == ("max new tokens", 8, 5)
    assert result.prefill_seconds > 0
    assert result.decode_seconds > 0
    assert batch.step() == []


class Watched(Session):
    """A session that notes the parts of its steps: slot, tokens, whether decoded."""

    def __init__(self, engine: Engine, slots: int) -> None:
        super().__init__(engine, slots=slots)
        self.steps: list[list[tuple[int, int, bool]]] = []

    def advance(self, parts: Sequence[Part], *, revocable: Collection[int] = ()) -> list[Floats]:
        """Note, then do."""
        self.steps.append([(part.run.slot, len(part.run.tokens), part.decoded) for part in parts])
        return super().advance(parts, revocable=revocable)


def test_tokens_that_decode_come_first_and_prompts_share_the_rest(engine: Engine) -> None:
    session = Watched(engine, SLOTS)
    batch = Batch(session, token_budget=6)
    early, long, late = (Request(PROMPT[:n], Options(5, mode="full")) for n in (2, 8, 4))
    batch.add(early)
    batch.step()
    batch.add(long)
    batch.add(late)
    assert (batch.running, batch.waiting) == (1, 2)
    for _ in range(3):
        batch.step()
    assert session.steps == [
        [(0, 2, True)],
        [(0, 1, True), (1, 5, True)],
        [(0, 1, True), (1, 3, True), (2, 2, True)],
        [(0, 1, True), (1, 1, True), (2, 2, True)],
    ]
    finish(batch, early, long, late)


def test_requests_wait_for_a_slot_in_order(engine: Engine) -> None:
    batch = Batch(Session(engine, slots=2))
    requests = [Request(PROMPT[: 1 + number], Options(1)) for number in range(5)]
    for request in requests:
        batch.add(request)
    order: list[int] = []
    while not batch.idle:
        order += [requests.index(event.request) for event in batch.step() if event.request.done]
    assert order == [0, 1, 2, 3, 4]


def test_a_request_that_leaves_makes_room(engine: Engine) -> None:
    batch = Batch(Session(engine, slots=1, poison=True))
    first, second, third = (Request(PROMPT, Options(20, mode="full")) for _ in range(3))
    for request in (first, second, third):
        batch.add(request)
    batch.step()
    batch.step()
    assert batch.cancel(second) == batch.cancel(first) == batch.cancel(first) == []
    assert (first.result.stop, second.result.stop, len(first.result.tokens)) == ("cancelled", "cancelled", 2)
    finish(batch, third)
    assert third.result.tokens == alone(engine, PROMPT, Options(20, mode="full"))
    assert second.result.tokens == []


def test_numbers_that_are_none_fail_one_sequence_alone(engine: Engine) -> None:
    bad = 7

    def spoil(seen: Observation) -> np.ndarray | None:
        if seen.name == "embedded" and (seen.array == embedded).any():
            spoilt.extend(np.flatnonzero(seen.array == embedded))
        if seen.name != "logits" or not spoilt:
            return None
        logits = seen.array.copy()
        logits[spoilt.pop()] = np.nan
        return logits

    embedded, spoilt = bad * 7919 + 13, list[int]()
    batch = Batch(Session(engine, slots=3, observe=spoil))
    prompts = ([1], [bad], [2])
    requests = [Request(prompt, Options(1)) for prompt in prompts]
    for request in requests:
        batch.add(request)
    finish(batch, *requests)
    assert [request.error is None for request in requests] == [True, False, True]
    assert isinstance(requests[1].error, ArtifactError)
    assert "logits: expected numbers, got nan" in str(requests[1].error)
    assert [request.result.tokens for request in requests[::2]] == [alone(engine, [n], Options(1)) for n in (1, 2)]


def test_a_step_that_fails_ends_its_requests_and_no_others(engine: Engine) -> None:
    fail = [True]

    def once(seen: Observation) -> np.ndarray | None:
        return np.zeros(1) if seen.name == "ids" and fail and fail.pop() else None

    batch = Batch(Session(engine, slots=1, observe=once))
    first, second = Request(PROMPT, Options(3)), Request(PROMPT, Options(3))
    batch.add(first)
    batch.add(second)
    finish(batch, first, second)
    assert isinstance(first.error, ContextError)
    assert second.result.tokens == alone(engine, PROMPT, Options(3))
    with pytest.raises(ContextError, match="graph encoder: value ids: expected int32"):
        list(
            Generation(
                Session(engine, observe=lambda seen: np.zeros(1) if seen.name == "ids" else None), [1], Options(1)
            )
        )


class Broken(Reuse):
    """Memory of earlier sequences that fails for prompts that begin with 7."""

    def begin(self, prompt: Tokens, **options: Any) -> Reused:
        """Fail, or find nothing."""
        if prompt[0] == 7:
            raise ContextError("nothing can be read")
        return super().begin(prompt, **options)


def test_a_sequence_that_cannot_begin_fails_alone(engine: Engine, tmp_path: Path) -> None:
    session = Session(engine, slots=1)
    batch = Batch(session, reuse=Broken(session, PrefixStore(tmp_path, engine.manifest)))
    first, second = Request([7, 8], Options(3)), Request(PROMPT, Options(3))
    batch.add(first)
    batch.add(second)
    finish(batch, first, second)
    assert str(first.error) == "nothing can be read"
    assert second.result.tokens == alone(engine, PROMPT, Options(3))


def test_what_does_not_fit_is_refused_before_it_waits(engine: Engine) -> None:
    batch = Batch(Session(engine, slots=2))
    with pytest.raises(ContextError, match="prompt: 65 tokens do not fit: the context holds 64"):
        batch.add(Request([1] * 65, Options(1)))
    with pytest.raises(ContextError, match="prompt: expected at least one token"):
        batch.add(Request([], Options(1)))
    with pytest.raises(UsageError, match="schedule: expected one of"):
        batch.add(Request([1], Options(1, mode="half")))
    batch.add(Request([1], Options(9)), slot=1)
    with pytest.raises(ContextError, match=r"slot: expected one of \[0\] that are free, got 1"):
        batch.add(Request([1], Options(1)), slot=1)
    assert (batch.running, batch.waiting) == (1, 0)
    with pytest.raises(UsageError, match="token-budget: expected at least 2, a token per slot, got 1"):
        Batch(Session(engine, slots=2), token_budget=1)


def test_log_probabilities_come_with_tokens(engine: Engine) -> None:
    pieces = list(Generation(Session(engine), PROMPT, Options(3, mode="full", logprobs=2)))
    session = Session(engine)
    logits = session.prefill(PROMPT, mode="full")
    for piece in pieces:
        assert piece.token is not None
        assert piece.logprobs is not None
        share = np.exp(logits.astype(np.float64))
        share /= share.sum()
        best = sorted(range(VOCABULARY), key=lambda token: (-float(share[token]), token))[:2]
        assert [token for token, _ in piece.logprobs.top] == best
        np.testing.assert_allclose([p for _, p in piece.logprobs.top], np.log(share[best]), atol=1e-12)
        assert piece.logprobs.chosen == piece.logprobs.top[0][1]
        logits = session.decode(piece.token)


@settings(max_examples=200, deadline=None)
@example(pieces=["ba", "c"], strings=["a", "bac"])
@given(
    pieces=st.lists(st.text("abc", max_size=4), max_size=8),
    strings=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
)
def test_stop_strings_are_found_wherever_pieces_end(pieces: list[str], strings: list[str]) -> None:
    whole, stop = "".join(pieces), StopStrings(strings)
    found = [(whole.find(string) + len(string), whole.find(string)) for string in strings if string in whole]
    given_out = ""
    for piece in pieces:
        given_out += stop.push(piece)
        assert whole.startswith(given_out)
    assert stop.found == bool(found)
    assert given_out + stop.finish() == (whole[: min(found)[1]] if found else whole)


def test_a_stop_string_ends_the_text_before_it(built: Built, tmp_path: Path) -> None:
    engine = load(write_engine(built, tmp_path / "toy", tokenizer=SHIPPED.read_bytes()))
    text, sampling = Text(engine), Sampling(temperature=50.0, seed=4)
    whole = Generation(Session(engine), PROMPT, Options(30, sampling), text)
    list(whole)
    assert len(whole.result.text) > 8
    string = whole.result.text[5:8]
    cut = Generation(Session(engine), PROMPT, Options(30, sampling, stop_strings=("nowhere", string)), text)
    assert (
        "".join(piece.text for piece in cut) == cut.result.text == whole.result.text[: whole.result.text.find(string)]
    )
    assert cut.result.stop == "stop string"
    assert cut.result.tokens == whole.result.tokens[: len(cut.result.tokens)]
    with pytest.raises(UsageError, match="stop: expected an engine with a tokenizer"):
        Request(PROMPT, Options(1, stop_strings=("x",)))
    with pytest.raises(UsageError, match="stop: expected strings of at least one character"):
        Options(1, stop_strings=("",))
