"""Reuse of prefixes: what a sequence begins with changes where windows are cut, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runtime.fake_engine import (
    CONTEXT,
    VOCABULARY,
    WINDOW,
    Built,
    expected,
    expected_draft,
    write_engine,
)
from v41c.errors import ContextError, UsageError
from v41c.runtime.artifact import Engine, load
from v41c.runtime.batch import Batch
from v41c.runtime.generate import Generation
from v41c.runtime.images import Grid, Picture
from v41c.runtime.pool import Pool
from v41c.runtime.prefix_store import PrefixStore
from v41c.runtime.request import Options, Request
from v41c.runtime.reuse import Reuse, Reused
from v41c.runtime.session import Session
from v41c.runtime.steps import Floats
from v41c.runtime.vision import ImagePrompt, Placed

TOKENS = [int(token) for token in np.random.default_rng(8).integers(0, VOCABULARY, CONTEXT)]
token_lists = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=CONTEXT - 6)


def prefill(
    session: Session,
    reuse: Reuse,
    tokens: Sequence[int],
    *,
    slot: int = 0,
    mode: str | None = None,
    replay: int | None = None,
    chunk: int | None = None,
) -> tuple[Floats, Reused]:
    """Logits of every token of a prompt that the decoder ran over, and what of it was reused."""
    reused = reuse.begin(tokens, slot=slot, mode=mode, replay=replay)
    assert session.length(slot) == reused.cached_tokens - reused.replayed_tokens
    rest = tokens[session.length(slot) :]
    return session.prefill_all(rest, slot=slot, mode=mode, replay=replay, chunk=chunk), reused


def store_of(engine: Engine, folder: Path | str) -> PrefixStore:
    return PrefixStore(folder, engine.manifest)


def saved(engine: Engine, folder: Path | str, tokens: Sequence[int]) -> None:
    """Let a session of its own keep a sequence in a store."""
    session = Session(engine)
    session.prefill(tokens, mode="ced")
    Reuse(session, store_of(engine, folder)).end(tokens)


@settings(max_examples=150, deadline=None)
@given(
    tokens=token_lists,
    shared=st.integers(0, CONTEXT),
    beyond=st.lists(st.integers(0, VOCABULARY - 1), max_size=5),
    mode=st.sampled_from(["ced", "full"]),
    replay=st.one_of(st.none(), st.integers(1, 20)),
    chunk=st.one_of(st.none(), st.integers(1, 9)),
    slot=st.integers(0, 2),
)
def test_a_replay_is_the_model_with_its_windows_cut(
    engine: Engine,
    tokens: list[int],
    shared: int,
    beyond: list[int],
    mode: str,
    replay: int | None,
    chunk: int | None,
    slot: int,
) -> None:
    length = len(tokens)
    kept = [*tokens[:shared], *beyond]
    common = next((i for i, (a, b) in enumerate(zip(tokens, kept, strict=False)) if a != b), min(length, len(kept)))
    cached = min(common, length - 1) // 2 * 2
    tail = length - (WINDOW if replay is None else replay)
    start = max(0, min(cached - WINDOW, tail))
    decoded = max(start, tail) if mode == "ced" else start
    with TemporaryDirectory() as folder:
        if kept:
            saved(engine, folder, kept)
        session = Session(engine, slots=3, poison=True)
        reuse = Reuse(session, store_of(engine, folder))
        logits, reused = prefill(session, reuse, tokens, slot=slot, mode=mode, replay=replay, chunk=chunk)
    assert reused == Reused(cached, cached - start)
    everything = [*tokens, *TOKENS[:5]]
    wanted = expected(everything, [(decoded, len(everything), decoded)], encoder_first=start).logits
    np.testing.assert_array_equal(logits, [wanted[position] for position in range(decoded, length)])
    assert (session.evaluated["encoder"], session.evaluated["decoder"]) == (length - start, length - decoded)
    if mode == "ced" and replay is None:
        evaluations = min(cached, WINDOW) + length - cached + min(length, WINDOW)
        assert session.block_evaluations == evaluations
    for position in range(length, len(everything)):
        np.testing.assert_array_equal(session.decode(everything[position], slot=slot), wanted[position])


@settings(max_examples=60, deadline=None)
@given(
    turns=st.lists(st.integers(1, 12), min_size=2, max_size=5),
    answers=st.integers(0, 3),
    mode=st.sampled_from(["ced", "full"]),
    slots=st.lists(st.integers(0, 2), min_size=5, max_size=5),
)
def test_a_live_sequence_goes_on_as_if_it_had_never_left(
    engine: Engine, turns: list[int], answers: int, mode: str, slots: list[int]
) -> None:
    alone = Session(engine, poison=True, drafting=True)
    session = Session(engine, slots=3, poison=True, drafting=True)
    with TemporaryDirectory() as folder:
        reuse = Reuse(session, store_of(engine, folder), Pool())
        length = 0
        for turn, slot in zip(turns, slots, strict=False):
            before, begin, length = dict(session.evaluated), length, length + turn
            wanted = alone.prefill_all(TOKENS[begin:length], mode=mode)
            logits, reused = prefill(session, reuse, TOKENS[:length], slot=slot, mode=mode)
            np.testing.assert_array_equal(logits, wanted)
            assert reused == Reused(begin)
            np.testing.assert_array_equal(session.draft({slot: 7})[slot].drafts, alone.draft({0: 7})[0].drafts)
            assert session.evaluated["encoder"] - before["encoder"] == turn
            for token in TOKENS[length : length + answers]:
                length += 1
                np.testing.assert_array_equal(session.decode(token, slot=slot), alone.decode(token))
            reuse.end(TOKENS[:length], slot=slot)


def test_a_local_state_without_its_global_rows_is_no_use(engine: Engine, tmp_path: Path) -> None:
    session = Session(engine, poison=True)
    pool = Pool()
    reuse = Reuse(session, store_of(engine, tmp_path), pool)
    prefill(session, reuse, TOKENS[:20])
    reuse.end(TOKENS[:20])
    for entry in tmp_path.rglob("*.prefix"):
        entry.write_bytes(entry.read_bytes()[:-1])
    logits, reused = prefill(session, reuse, TOKENS[:30])
    assert reused == Reused()
    np.testing.assert_array_equal(logits, Session(engine).prefill_all(TOKENS[:30]))
    reuse.end(TOKENS[:30])
    for entry in tmp_path.rglob("*.prefix"):
        entry.unlink()
    assert prefill(session, reuse, TOKENS[:40])[1] == Reused()


def test_what_saves_more_is_taken(engine: Engine, tmp_path: Path) -> None:
    session = Session(engine, poison=True)
    reuse = Reuse(session, store_of(engine, tmp_path), Pool())
    prefill(session, reuse, TOKENS[:10])
    reuse.end(TOKENS[:10])
    saved(engine, tmp_path, TOKENS[:14])
    # a replay from 10 on is as long as going on from 10
    assert prefill(session, reuse, TOKENS[:40])[1] == Reused(10)
    saved(engine, tmp_path, TOKENS[:16])
    assert prefill(session, reuse, TOKENS[:40])[1] == Reused(16, WINDOW)


def test_a_full_pool_forgets_the_oldest_and_prefixes_are_still_reused(engine: Engine, tmp_path: Path) -> None:
    prompts = [[start, *TOKENS[:15]] for start in range(4)]
    session = Session(engine, poison=True)
    trial = Pool()
    reuse = Reuse(session, store_of(engine, tmp_path / "trial"), trial)
    prefill(session, reuse, prompts[0])
    reuse.end(prompts[0])
    size_bytes = trial.size_bytes
    pool = Pool(limit_bytes=2 * size_bytes)
    reuse = Reuse(session, store_of(engine, tmp_path / "store"), pool)
    for prompt in prompts:
        assert prefill(session, reuse, prompt)[1] == Reused()
        reuse.end(prompt)
        assert pool.size_bytes <= 2 * size_bytes
    hits = [prefill(session, reuse, [*prompt, 1, 2, 3])[1] for prompt in prompts]
    assert hits == [Reused(16, WINDOW)] * 2 + [Reused(16)] * 2
    tiny = Reuse(session, store_of(engine, tmp_path / "store"), Pool(limit_bytes=0))
    prefill(session, tiny, prompts[0])
    tiny.end(prompts[0])
    assert prefill(session, tiny, [*prompts[0], 1])[1] == Reused(16, WINDOW)


def test_a_pool_forgets_what_was_not_used_for_a_while(engine: Engine, tmp_path: Path) -> None:
    now = 100.0
    session = Session(engine, poison=True)
    pool = Pool(seconds_to_live=10, clock=lambda: now)
    reuse = Reuse(session, store_of(engine, tmp_path), pool)
    prefill(session, reuse, TOKENS[:20])
    reuse.end(TOKENS[:20])
    for later in (10, 10):
        now += later
        assert prefill(session, reuse, TOKENS[:30])[1] == Reused(20)
    now += 10.5
    assert prefill(session, reuse, TOKENS[:30])[1] == Reused(20, WINDOW)
    assert (len(pool), pool.size_bytes) == (0, 0)
    for name, options in (("bytes", {"limit_bytes": -1}), ("seconds", {"seconds_to_live": -1})):
        with pytest.raises(UsageError, match=f"pool {name}: expected 0 or more, got -1"):
            Pool(**options)  # type: ignore[arg-type]


def test_drafts_look_back_to_where_the_decoder_s_replay_began(engine: Engine, tmp_path: Path) -> None:
    saved(engine, tmp_path, TOKENS[:20])
    session = Session(engine, poison=True, drafting=True)
    reuse = Reuse(session, store_of(engine, tmp_path))
    prefill(session, reuse, TOKENS[:22])
    hidden = expected(TOKENS[:22], [(18, 22, 18)], encoder_first=16).hidden
    draft = session.draft({0: TOKENS[22]})[0]
    assert draft.drafts.tolist() == expected_draft(hidden, TOKENS[22], 22, 18)


def test_a_prompt_is_checked_before_any_work(engine: Engine, tmp_path: Path) -> None:
    session = Session(engine)
    reuse = Reuse(session, store_of(engine, tmp_path))
    session.prefill(TOKENS[:9])
    with pytest.raises(ContextError, match="prompt: expected at least one token, got none"):
        reuse.begin([])
    with pytest.raises(ContextError, match="token 0: expected an id of 0 to 30, got 31"):
        reuse.begin([31])
    with pytest.raises(UsageError, match="expected one of ced, decode, full, got 'half'"):
        reuse.begin([1], mode="half")
    assert session.length() == 9


@pytest.mark.parametrize(("mode", "steps"), [("ced", 2), ("full", 1)])
def test_sequences_of_a_batch_share_their_replays(built: Built, tmp_path: Path, mode: str, steps: int) -> None:
    engine = load(write_engine(built, tmp_path / "wide", variants=(1, 16)))
    saved(engine, tmp_path / "store", TOKENS[:20])
    for count in (1, 3):
        session = Session(engine, slots=3, poison=True)
        batch = Batch(session, reuse=Reuse(session, store_of(engine, tmp_path / "store")))
        requests = [Request([*TOKENS[:20], token], Options(1, mode=mode)) for token in range(count)]
        for request in requests:
            batch.add(request)
        for _ in range(steps):
            assert not any(request.done for request in requests)
            batch.step()
        for token, request in enumerate(requests):
            assert request.done
            assert request.result.reused == Reused(20, WINDOW)
            begin = 17 if mode == "ced" else 16
            wanted = expected([*TOKENS[:20], token], [(begin, 21, begin)], encoder_first=16).logits[20]
            assert request.result.tokens == [int(np.argmax(wanted))]


def test_an_engine_with_one_graph_replays_with_all_windows_cut(built: Built, tmp_path: Path) -> None:
    engine = load(write_engine(built, tmp_path / "one", graphs=["model"]))
    store = store_of(engine, tmp_path / "store")
    session = Session(engine, poison=True)
    session.prefill(TOKENS[:21])
    Reuse(session, store).end(TOKENS[:21])
    session = Session(engine, poison=True)
    logits, reused = prefill(session, Reuse(session, store), TOKENS[:30])
    assert reused == Reused(20, WINDOW)
    wanted = expected(TOKENS[:30], [(16, 30, 16)], encoder_first=16).logits
    np.testing.assert_array_equal(logits, [wanted[position] for position in range(16, 30)])
    assert session.evaluated == {"model": 14}


@pytest.mark.parametrize("draft", [1, 2])
def test_what_verifications_took_back_is_not_kept(engine: Engine, tmp_path: Path, draft: int) -> None:
    alone = Session(engine, poison=True)
    session = Session(engine, slots=2, poison=True, drafting=True)
    reuse = Reuse(session, store_of(engine, tmp_path), Pool())
    turns: list[int] = []
    for begin in range(0, 24, 6):
        turns += TOKENS[begin : begin + 6]
        batch = Batch(session, reuse=reuse)
        request = Request(turns, Options(5, mode="full", draft=draft))
        batch.add(request)
        while not batch.idle:
            batch.step()
        assert request.result.reused == Reused(alone.length())
        generation = Generation(alone, turns[alone.length() :], Options(5, mode="full"))
        assert [piece.token for piece in generation] == request.result.tokens
        turns += request.result.tokens


def test_images_are_told_apart_by_what_is_seen(engine: Engine, tmp_path: Path) -> None:
    session = Session(engine)
    reuse = Reuse(session, store_of(engine, tmp_path))
    grid, patches = Grid(2, 3, 1), np.zeros((6, 3), np.float32)
    tokens = np.array(TOKENS[:40], np.int32)

    def seeing(content: bytes) -> ImagePrompt:
        return ImagePrompt(tokens, [Placed(Picture(grid, patches, content), 11)])

    session.prefill(TOKENS[:40])
    reuse.end(seeing(b"a cat"))
    assert reuse.begin(seeing(b"a cat")) == Reused(38, WINDOW)
    assert reuse.begin(seeing(b"a dog")) == Reused(10, WINDOW)
    assert reuse.begin(TOKENS[:40]) == Reused(10, WINDOW)


def test_a_batch_keeps_what_its_sequences_were_fed(engine: Engine, tmp_path: Path) -> None:
    session = Session(engine, slots=3, poison=True)
    reuse = Reuse(session, store_of(engine, tmp_path), Pool())
    batch = Batch(session, reuse=reuse)
    first = Request(TOKENS[:9], Options(6))
    left = Request(TOKENS[10:30], Options(6))
    for request in (first, left):
        batch.add(request)
    batch.step()
    batch.cancel(left)
    while not batch.idle:
        batch.step()
    turns = [*TOKENS[:9], *first.result.tokens, 3, 1, 4]
    second = Request(turns, Options(4))
    third = Request(TOKENS[10:30], Options(1))
    for request in (second, third):
        batch.add(request)
    while not batch.idle:
        batch.step()
    # the last token that a sequence chose was not fed; a prompt that was not fed to its end is not kept
    assert (second.result.reused, third.result.reused) == (Reused(9 + 5), Reused())
    alone = Session(engine)
    assert list(Generation(alone, TOKENS[:9], Options(6)))[-1].token == turns[14]
    generation = Generation(alone, turns[14:], Options(4))
    assert [piece.token for piece in generation] == second.result.tokens


def test_a_generation_continues_what_is_in_its_slot_or_begins_with_a_prefix(engine: Engine, tmp_path: Path) -> None:
    session = Session(engine, poison=True)
    reuse = Reuse(session, store_of(engine, tmp_path))
    first = Generation(session, TOKENS[:9], Options(6, mode="full"), reuse=reuse)
    list(first)
    more = Generation(session, first.result.tokens[-1:], Options(3, mode="full"), reuse=reuse)
    list(more)
    assert more.result.reused == Reused()
    session.reset()
    again = Generation(session, TOKENS[:9], Options(6, mode="full"), reuse=reuse)
    list(again)
    assert again.result.reused == Reused(8, WINDOW)
