"""Sessions: every way to feed tokens gives what the model computes on the whole sequence at once."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runtime.fake_engine import (
    BLOCK,
    CONTEXT,
    SLOTS,
    VOCABULARY,
    WINDOW,
    Built,
    expected,
    expected_draft,
    write_engine,
)
from v41c.errors import ArtifactError, ContextError, UsageError
from v41c.manifest import Manifest
from v41c.runtime import schedules
from v41c.runtime.artifact import Engine, load
from v41c.runtime.device import Observation
from v41c.runtime.session import Session
from v41c.runtime.steps import Room

TOKENS = [int(token) for token in np.random.default_rng(5).integers(0, VOCABULARY, CONTEXT)]
token_lists = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=CONTEXT)


@settings(max_examples=60, deadline=None)
@given(tokens=token_lists, chunks=st.lists(st.integers(1, 12), min_size=1, max_size=6), data=st.data())
def test_any_split_of_a_prompt_equals_the_whole(
    engine: Engine, tokens: list[int], chunks: list[int], data: st.DataObject
) -> None:
    session = Session(engine, poison=True)
    whole = expected(tokens, [(0, len(tokens), 0)]).logits
    begin = 0
    while begin < len(tokens):
        size = data.draw(st.sampled_from(chunks))
        part = tokens[begin : begin + size]
        logits = session.prefill_all(part, mode="full", chunk=data.draw(st.sampled_from([None, *chunks])))
        np.testing.assert_array_equal(logits, [whole[p] for p in range(begin, begin + len(part))])
        begin += len(part)
    assert session.length() == len(tokens)
    assert session.evaluated["encoder"] == session.evaluated["decoder"] == len(tokens)


@settings(max_examples=60, deadline=None)
@given(
    tokens=token_lists,
    replay=st.integers(1, 20),
    chunk=st.one_of(st.none(), st.integers(1, 12)),
    later=st.lists(st.integers(0, VOCABULARY - 1), max_size=6),
)
def test_ced_runs_the_decoder_over_the_tail_only(
    engine: Engine, tokens: list[int], replay: int, chunk: int | None, later: list[int]
) -> None:
    tokens = tokens[: CONTEXT - len(later)]
    session = Session(engine, poison=True)
    start = max(0, len(tokens) - replay)
    everything = [*tokens, *later]
    # Later tokens see no decoder keys from before the replay: they were never written.
    wanted = expected(everything, [(start, len(everything), start)]).logits
    logits = session.prefill(tokens, mode="ced", replay=replay, chunk=chunk)
    np.testing.assert_array_equal(logits, wanted[len(tokens) - 1])
    assert session.evaluated["encoder"] == len(tokens)
    assert session.evaluated["decoder"] == min(len(tokens), replay)
    assert session.block_evaluations == len(tokens) + min(len(tokens), replay)
    for position, token in enumerate(later, len(tokens)):
        np.testing.assert_array_equal(session.decode(token), wanted[position])


@settings(max_examples=30, deadline=None)
@given(turns=st.lists(st.tuples(st.lists(st.integers(0, 30), min_size=1, max_size=15), st.booleans()), max_size=5))
def test_turns_continue_a_sequence_in_any_mode(engine: Engine, turns: list[tuple[list[int], bool]]) -> None:
    session = Session(engine, poison=True)
    tokens: list[int] = []
    stretches: list[tuple[int, int, int]] = []
    first = 0
    for turn, ced in turns:
        if len(tokens) + len(turn) > CONTEXT:
            break
        begin, end = len(tokens), len(tokens) + len(turn)
        if ced and len(turn) > WINDOW:
            begin = first = end - WINDOW
        tokens += turn
        stretches.append((begin, end, first))
        logits = session.prefill(turn, mode="ced" if ced else "full")
        np.testing.assert_array_equal(logits, expected(tokens, stretches).logits[end - 1])


@pytest.mark.parametrize("name", schedules.names())
def test_every_schedule_equals_one_shot_within_the_window(engine: Engine, name: str) -> None:
    tokens = TOKENS[:WINDOW]
    whole = expected(tokens, [(0, WINDOW, 0)]).logits
    for all_tokens in (False, True):
        session = Session(engine, poison=True)
        logits = session.prefill_all(tokens, mode=name) if all_tokens else session.prefill(tokens, mode=name)[None]
        np.testing.assert_array_equal(logits, [whole[p] for p in range(WINDOW)][-len(logits) :])


def test_ced_differs_from_full_beyond_the_window(engine: Engine) -> None:
    full = Session(engine).prefill_all(TOKENS, mode="full")
    ced = Session(engine).prefill_all(TOKENS, mode="ced")
    # With a single decoder layer the last token has its whole window in the replay, and those before it have not.
    assert [np.array_equal(*rows) for rows in zip(full[-WINDOW:], ced, strict=True)] == [False] * 3 + [True]
    np.testing.assert_array_equal(full, Session(engine).prefill_all(TOKENS, mode="ced", replay=CONTEXT))


def test_ced_is_the_default_and_full_where_it_is_impossible(engine: Engine, built: Built, tmp_path: Path) -> None:
    assert Session(engine).default_mode == "ced"
    late = write_engine(
        built, tmp_path / "late", causal_encoder_decoder=False, why_not_ced="layers.7 has an Engram in the decoder"
    )
    session = Session(load(late))
    assert session.default_mode == "full"
    with pytest.raises(UsageError, match=r"prefill ced: .*layers.7 has an Engram in the decoder: use full"):
        session.prefill(TOKENS, mode="ced")
    whole = expected(TOKENS, [(0, CONTEXT, 0)]).logits
    np.testing.assert_array_equal(session.prefill(TOKENS), whole[CONTEXT - 1])


def test_an_engine_with_one_graph_runs_full_only(built: Built, tmp_path: Path) -> None:
    session = Session(load(write_engine(built, tmp_path / "one", graphs=["model"])), poison=True)
    with pytest.raises(UsageError, match=r"prefill ced: .*without the pass split-encoder-decoder: use full"):
        session.prefill(TOKENS, mode="ced")
    whole = expected(TOKENS, [(0, CONTEXT, 0)]).logits
    np.testing.assert_array_equal(session.prefill(TOKENS[:11]), whole[10])
    np.testing.assert_array_equal(session.decode(TOKENS[11]), whole[11])
    assert session.evaluated == {"model": 12}
    assert session.block_evaluations == 24


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_sequences_in_slots_do_not_see_each_other(engine: Engine, data: st.DataObject) -> None:
    session = Session(engine, slots=SLOTS, poison=True)
    fed: list[list[int]] = [[] for _ in range(SLOTS)]
    for _ in range(data.draw(st.integers(1, 5))):
        slots = data.draw(st.permutations(range(SLOTS)))[: data.draw(st.integers(1, SLOTS))]
        step = {s: data.draw(st.lists(st.integers(0, 30), min_size=1, max_size=8 // len(slots))) for s in slots}
        logits = session.step(step)
        for row, (slot, tokens) in zip(logits, step.items(), strict=True):
            fed[slot] += tokens
            np.testing.assert_array_equal(row, expected(fed[slot], [(0, len(fed[slot]), 0)]).logits[len(fed[slot]) - 1])


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_prefills_of_several_sequences_share_steps(engine: Engine, data: st.DataObject) -> None:
    session = Session(engine, slots=SLOTS, poison=True)
    prompts = [data.draw(token_lists) for _ in range(SLOTS)]
    modes = [data.draw(st.sampled_from(["ced", "full"])) for _ in range(SLOTS)]
    feeds = [session.feed(prompts[slot], slot=slot, mode=modes[slot]) for slot in range(SLOTS)]
    logits: dict[int, np.ndarray] = {}
    while not all(feed.done for feed in feeds):
        room, parts = Room(data.draw(st.integers(1, 8)), data.draw(st.integers(1, 3))), []
        for slot in data.draw(st.permutations(range(SLOTS))):
            part = feeds[slot].take(room)
            if part is not None:
                room = room.after(part)
                parts.append(part)
        for part, rows in zip(parts, session.advance(parts), strict=True):
            logits |= {part.run.slot: rows[0]} if len(rows) else {}
    decoded = 0
    for slot, tokens in enumerate(prompts):
        start = max(0, len(tokens) - WINDOW) if modes[slot] == "ced" else 0
        decoded += len(tokens) - start
        np.testing.assert_array_equal(
            logits[slot], expected(tokens, [(start, len(tokens), start)]).logits[len(tokens) - 1]
        )
        assert session.length(slot) == len(tokens)
    total = sum(len(tokens) for tokens in prompts)
    assert (session.evaluated["encoder"], session.evaluated["decoder"]) == (total, decoded)
    assert session.block_evaluations == total + decoded


def test_a_sequence_is_unusable_while_its_tail_is_missing(engine: Engine) -> None:
    session = Session(engine)
    feed = session.feed(TOKENS[:6], mode="ced")
    part = feed.take(session.room)
    assert part is not None
    assert [len(logits) for logits in session.advance([part])] == [0]
    assert (session.evaluated["encoder"], session.evaluated["decoder"]) == (2, 0)
    with pytest.raises(ContextError, match="slot 0: its last step was interrupted: reset it"):
        session.decode(1)


def test_a_slot_is_free_again_after_reset(engine: Engine) -> None:
    session = Session(engine, slots=2, poison=True)
    session.prefill(TOKENS, slot=1, mode="ced")
    session.reset(1)
    assert session.length(1) == 0
    whole = expected(TOKENS[:9], [(0, 9, 0)]).logits
    np.testing.assert_array_equal(session.prefill(TOKENS[:9], slot=1, mode="full"), whole[8])


def test_no_sequences_is_a_step_too(engine: Engine) -> None:
    assert Session(engine).step({}).shape == (0, VOCABULARY)


@pytest.mark.parametrize("mode", ["full", "ced"])
def test_drafts_follow_the_context_of_every_decoded_token(engine: Engine, mode: str) -> None:
    session = Session(engine, drafting=True, poison=True)
    length = 23
    start = length - WINDOW if mode == "ced" else 0
    hidden = expected(TOKENS, [(start, CONTEXT, start)]).hidden
    session.prefill(TOKENS[:length], mode=mode)
    for position in range(length, length + 3):
        draft = session.draft({0: TOKENS[position]})[0]
        assert draft.drafts.tolist() == expected_draft(hidden, TOKENS[position], position, start)
        assert (draft.logits.shape, draft.confidence.shape) == ((0, VOCABULARY), (BLOCK,))
        assert session.draft({0: TOKENS[position]}, logits=True)[0].logits.shape == (BLOCK, VOCABULARY)
        session.decode(TOKENS[position])
    assert session.length() == length + 3


def test_sequences_draft_together_and_do_not_see_each_other(engine: Engine) -> None:
    session = Session(engine, slots=SLOTS, drafting=True, poison=True)
    lengths = {2: 9, 0: 1, 1: 14}
    for slot, length in lengths.items():
        session.prefill(TOKENS[slot : slot + length], slot=slot, mode="full")
    # blocks of 3 in a graph of 8 tokens: two sequences in the first execution, one in the second
    drafts = session.draft({slot: TOKENS[slot + length] for slot, length in lengths.items()})
    assert session.evaluated["draft"] == SLOTS * BLOCK
    assert list(drafts) == list(lengths)
    for slot, length in lengths.items():
        tokens = TOKENS[slot : slot + length + 1]
        hidden = expected(tokens, [(0, length, 0)]).hidden
        assert drafts[slot].drafts.tolist() == expected_draft(hidden, tokens[-1], length, 0)


def test_drafts_look_no_further_back_than_the_context_that_was_kept_up(engine: Engine) -> None:
    session = Session(engine, drafting=True, poison=True)
    hidden = expected(TOKENS, [(0, CONTEXT, 0)]).hidden
    session.prefill(TOKENS[:20], mode="full")
    session.drafting = False
    session.step({0: TOKENS[20:25]})
    with pytest.raises(UsageError, match="draft: open the session with drafting=True"):
        session.draft({0: 1})
    session.drafting = True
    for position in range(25, 32):
        assert session.draft({0: 3})[0].drafts.tolist() == expected_draft(hidden, 3, position, max(25, position - 4))
        session.decode(TOKENS[position])
    session.reset()
    session.prefill(TOKENS[:2], mode="full")
    assert session.draft({0: 3})[0].drafts.tolist() == expected_draft(hidden, 3, 2, 0)


def test_drafting_must_be_asked_for_and_compiled_in(engine: Engine, built: Built, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="draft: open the session with drafting=True"):
        Session(engine).draft({0: 1})
    plain = load(write_engine(built, tmp_path / "plain", graphs=["encoder", "decoder"]))
    with pytest.raises(ContextError, match="plain: this engine has no draft head"):
        Session(plain, drafting=True)
    with pytest.raises(ContextError, match="plain: this engine has no draft head"):
        Session(plain).drafting = True


def test_observing_shows_every_result_and_changes_none(engine: Engine) -> None:
    seen: list[Observation] = []
    session = Session(engine, observe=seen.append)
    logits = session.prefill(TOKENS[:7], mode="full")
    np.testing.assert_array_equal(logits, Session(engine).prefill(TOKENS[:7], mode="full"))
    assert [(o.graph, o.op, o.origin, o.name, o.dtype, o.array.shape) for o in seen] == [
        ("encoder", "embed", "embed", "embedded", "i32", (7,)),
        ("encoder", "encode", "layers.0", "stream", "bf16", (7, 64)),
        ("encoder", "encode", "layers.0", "ids", "i32", (7,)),
        ("decoder", "finish", "layers.1", "logits", "f32", (1, VOCABULARY)),
        ("decoder", "finish", "layers.1", "main_hidden", "i32", (7, 3)),
    ]
    np.testing.assert_array_equal(seen[3].array[0], logits)


def test_an_observer_may_put_another_result_in_place(engine: Engine) -> None:
    tokens, others = TOKENS[:WINDOW], TOKENS[WINDOW : 2 * WINDOW]
    seen: list[Observation] = []
    wanted = Session(engine, observe=seen.append).prefill(tokens)
    assert not np.array_equal(Session(engine).prefill(others), wanted)

    def swap(observation: Observation) -> np.ndarray | None:
        return seen[0].array if observation.name == "embedded" else None

    np.testing.assert_array_equal(Session(engine, observe=swap).prefill(others), wanted)
    with pytest.raises(ContextError, match=r"graph encoder: value ids: expected int32 \(2,\), got float64 \(1,\)"):
        Session(engine, observe=lambda o: np.zeros(1) if o.name == "ids" else None).prefill([1, 2])


def test_memory_of_prefill_does_not_grow_with_the_prompt(built: Built, tmp_path: Path) -> None:
    session = Session(load(write_engine(built, tmp_path / "long", max_context=20000)))
    prompt = np.arange(20000, dtype=np.int32) % VOCABULARY

    def peak_bytes(tokens: int) -> int:
        session.reset()
        tracemalloc.start()
        session.prefill(prompt[:tokens], mode="ced")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    peak_bytes(1000)
    # Checking and converting the token ids takes about 11 bytes a token; keeping the encoder's outputs would take 132.
    assert peak_bytes(20000) - peak_bytes(1000) < 19000 * 20


@pytest.mark.parametrize("chunk", [None, 1, 3])
def test_prompts_up_to_the_context_fit_and_no_longer_ones(engine: Engine, chunk: int | None) -> None:
    session = Session(engine)
    with pytest.raises(ContextError, match="prompt: 65 tokens do not fit: the context holds 64 and 0 are used"):
        session.prefill([*TOKENS, 1], chunk=chunk)
    assert session.length() == 0
    assert session.evaluated == dict.fromkeys(session.evaluated, 0)
    session.prefill(TOKENS, chunk=chunk)
    with pytest.raises(ContextError, match="prompt: 1 tokens do not fit: the context holds 64 and 64 are used"):
        session.decode(1)
    with pytest.raises(ContextError, match="64 are used"):
        session.step({0: [1]})
    assert session.length() == CONTEXT


def test_a_session_may_have_a_shorter_context_than_the_engine(engine: Engine) -> None:
    session = Session(engine, max_context=9, poison=True)
    whole = expected(TOKENS[:9], [(0, 9, 0)]).logits
    np.testing.assert_array_equal(session.prefill(TOKENS[:9], mode="full"), whole[8])
    with pytest.raises(ContextError, match="the context holds 9"):
        session.decode(1)
    assert session.memory_bytes < Session(engine).memory_bytes


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], "prompt: expected at least one token, got none"),
        ([[1, 2]], "prompt: expected token ids in one dimension, got 2"),
        ([[1], [2, 3]], "prompt: expected token ids in one dimension, got a ragged list"),
        ([3, VOCABULARY], "prompt: token 1: expected an id of 0 to 30, got 31"),
        ([-1], "prompt: token 0: expected an id of 0 to 30, got -1"),
        ([2**70], r"prompt: expected token ids of 0 to 30, got \[1180591620717411303424\]"),
        ([0.5], r"prompt: expected token ids of 0 to 30, got \[0.5\]"),
    ],
)
def test_bad_prompts_are_refused(engine: Engine, tokens: list[int], message: str) -> None:
    session = Session(engine)
    for mode in ("ced", "full"):
        with pytest.raises(ContextError, match=message):
            session.prefill(tokens, mode=mode)
    assert session.length() == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "half"}, "schedule: expected one of ced, decode, full, got 'half'"),
        ({"replay": 0}, "replay: expected at least 1 token, got 0"),
        ({"chunk": 0}, "chunk: expected at least 1 token, got 0"),
    ],
)
def test_bad_options_are_refused(engine: Engine, options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Session(engine).prefill(TOKENS, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slots": 4}, "slots: expected 1 to 3, what the engine was compiled for, got 4"),
        ({"slots": 0}, "slots: expected 1 to 3"),
        ({"max_context": 65}, "context: expected 1 to 64"),
    ],
)
def test_sessions_stay_within_the_engine(engine: Engine, options: dict[str, int], message: str) -> None:
    with pytest.raises(ContextError, match=message):
        Session(engine, **options)  # type: ignore[arg-type]


def test_slots_and_steps_are_checked(engine: Engine) -> None:
    session = Session(engine, slots=2)
    with pytest.raises(ContextError, match="slot: expected 0 to 1, got 2"):
        session.prefill(TOKENS, slot=2)
    with pytest.raises(ContextError, match="step: expected at most 8 tokens of 8 sequences, got 9 of 2: split it"):
        session.step({0: TOKENS[:4], 1: TOKENS[:5]})
    assert (session.length(0), session.length(1)) == (0, 0)
    with pytest.raises(UsageError, match="threads: expected at least 1, got 0"):
        Session(engine, threads=0)


def test_more_memory_than_there_is_is_one_line(built: Built, tmp_path: Path) -> None:
    huge = load(write_engine(built, tmp_path / "huge", max_context=2**62))
    with pytest.raises(ContextError, match=r"state layers.0.compressed: \d+ bytes cannot be had on this machine"):
        Session(huge)


def test_an_interrupted_step_makes_the_slot_unusable_until_reset(engine: Engine) -> None:
    def interrupt(observation: Observation) -> None:
        if observation.graph == "decoder":
            raise KeyboardInterrupt

    session = Session(engine, slots=2, observe=interrupt)
    with pytest.raises(KeyboardInterrupt):
        session.prefill(TOKENS)
    with pytest.raises(ContextError, match="slot 0: its last step was interrupted: reset it"):
        session.decode(1)
    assert session.length(1) == 0
    session.reset()
    assert session.length() == 0


def test_a_kernel_that_refuses_its_arguments_is_named(built: Built, tmp_path: Path) -> None:
    def shorten(manifest: Manifest) -> Manifest:
        commands = [
            [msgspec.structs.replace(command, arguments=command.arguments[:-1]) for command in program.commands]
            for program in manifest.programs
        ]
        programs = [
            msgspec.structs.replace(program, commands=changed)
            for program, changed in zip(manifest.programs, commands, strict=True)
        ]
        return msgspec.structs.replace(manifest, programs=programs)

    session = Session(load(write_engine(built, tmp_path / "short", change=shorten)))
    message = "kernels.so: graph encoder: command 0 .embed of embed.: kernel embed failed: ValueError: arguments differ"
    with pytest.raises(ArtifactError, match=message):
        session.prefill(TOKENS)
