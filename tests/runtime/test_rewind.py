"""Tokens that a verification fed are taken back: every byte is as if they had never been fed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.codegen.cuda.driver import HostDriver
from tests.runtime.fake_engine import BLOCK, CONTEXT, SLOTS, VOCABULARY, expected, expected_draft
from v41c.errors import ContextError, UsageError
from v41c.manifest import capacities
from v41c.runtime.artifact import Engine
from v41c.runtime.cpu import CpuDevice
from v41c.runtime.cuda import CudaDevice
from v41c.runtime.device import Device
from v41c.runtime.journal import Journal
from v41c.runtime.session import Session
from v41c.runtime.states import Array, States

TOKENS = [int(token) for token in np.random.default_rng(6).integers(0, VOCABULARY, CONTEXT)]
some_tokens = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=BLOCK + 1)


def opened(engine: Engine, slots: int = 1) -> Session:
    return Session(engine, slots=slots, drafting=True, poison=True)


def require_same_states(found: Session, wanted: Session) -> None:
    for name, state in wanted.states.items():
        np.testing.assert_array_equal(found.states[name].view(np.uint8), state.view(np.uint8), name)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_what_is_taken_back_leaves_no_trace(engine: Engine, data: st.DataObject) -> None:
    """Sequences in slots, each with tokens verified and some of them taken back, again and again."""
    session, plain = opened(engine, SLOTS), opened(engine, SLOTS)
    fed: list[list[int]] = [[] for _ in range(SLOTS)]
    for _ in range(data.draw(st.integers(1, 8))):
        slots = data.draw(st.lists(st.integers(0, SLOTS - 1), min_size=1, max_size=2, unique=True))
        verified = {slot: data.draw(some_tokens) for slot in slots}
        found = session.verify(verified)
        for slot, tokens in verified.items():
            whole = [*fed[slot], *tokens]
            wanted = expected(whole, [(0, len(whole), 0)]).logits
            np.testing.assert_array_equal(found[slot], [wanted[p] for p in range(len(fed[slot]), len(whole))])
            length = len(fed[slot]) + data.draw(st.integers(0, len(tokens)))
            session.rewind(length, slot=slot)
            fed[slot] = whole[:length]
            if plain.length(slot) < length:
                plain.step({slot: fed[slot][plain.length(slot) :]})
            assert session.length(slot) == length
        require_same_states(session, plain)


@settings(max_examples=20, deadline=None)
@given(prompt=st.integers(1, 40), mode=st.sampled_from(["full", "ced"]), tokens=some_tokens)
def test_a_sequence_goes_on_from_every_length_it_is_taken_back_to(
    engine: Engine, prompt: int, mode: str, tokens: list[int]
) -> None:
    for kept in range(len(tokens) + 1):
        session = opened(engine)
        session.prefill(TOKENS[:prompt], mode=mode)
        session.verify({0: tokens})
        session.rewind(prompt + kept)
        whole = [*TOKENS[:prompt], *tokens[:kept], 7, 8]
        start = max(0, prompt - 4) if mode == "ced" else 0
        wanted = expected(whole, [(start, len(whole), start)])
        draft = session.draft({0: 7})[0]
        assert draft.drafts.tolist() == expected_draft(wanted.hidden, 7, prompt + kept, start)
        np.testing.assert_array_equal(session.decode(7), wanted.logits[prompt + kept])
        np.testing.assert_array_equal(session.decode(8), wanted.logits[prompt + kept + 1])


def test_a_verification_can_be_taken_back_in_several_steps(engine: Engine) -> None:
    session, plain = opened(engine), opened(engine)
    for fed in (session, plain):
        fed.prefill(TOKENS[:9], mode="full")
    session.verify({0: TOKENS[9:13]})
    for length in (12, 12, 10, 9):
        session.rewind(length)
    require_same_states(session, plain)
    with pytest.raises(ContextError, match="rewind: slot 0: expected a length within 9 to 9, got 10"):
        session.rewind(10)


def test_nothing_but_the_last_verification_can_be_taken_back(engine: Engine) -> None:
    session = opened(engine, 2)
    session.prefill(TOKENS[:6], slot=1, mode="full")
    over = "rewind: slot 1: expected a length within its last verification, which is over, got 5"
    with pytest.raises(ContextError, match=over):
        session.rewind(5, slot=1)
    session.verify({1: TOKENS[6:8], 0: TOKENS[:1]})
    for length in (5, 9, -1):
        with pytest.raises(ContextError, match=f"slot 1: expected a length within 6 to 8, got {length}"):
            session.rewind(length, slot=1)
    session.decode(3, slot=1)
    with pytest.raises(ContextError, match=r"its last verification, which is over, got 7"):
        session.rewind(7, slot=1)
    session.rewind(0)
    session.verify({0: TOKENS[:2]})
    session.reset()
    with pytest.raises(ContextError, match="which is over, got 0"):
        session.rewind(0)


def test_the_context_of_drafts_goes_back_with_the_sequence(engine: Engine) -> None:
    """What is fed afterwards without drafting is no context, although positions beyond were once written."""
    session = opened(engine)
    session.prefill(TOKENS[:6], mode="full")
    session.verify({0: TOKENS[6:10]})
    session.rewind(7)
    session.drafting = False
    session.step({0: TOKENS[7:10]})
    session.drafting = True
    assert session.standing().context.stop == 7
    assert session.draft({0: 9})[0].drafts.tolist() == expected_draft({}, 9, 10, 10)


def test_verifications_are_checked_before_any_work(engine: Engine) -> None:
    session = opened(engine, 3)
    with pytest.raises(ContextError, match="verify: slot 2: expected at most 4 tokens, got 5"):
        session.verify({0: [1], 2: [1] * 5})
    with pytest.raises(ContextError, match="verify: expected at most 8 tokens in one step, got 9: split it"):
        session.verify({0: [1] * 4, 1: [1] * 4, 2: [1]})
    with pytest.raises(ContextError, match="slot: expected 0 to 2, got 3"):
        session.rewind(0, slot=3)
    assert session.verify({}) == {}
    assert [session.length(slot) for slot in range(3)] == [0, 0, 0]
    with pytest.raises(UsageError, match="verify: open the session with drafting=True"):
        Session(engine).verify({0: [1]})


def test_memory_for_it_is_taken_by_sessions_that_draft_only(engine: Engine) -> None:
    # i32: rings of BLOCK + 1 rows, and the rows that as many tokens close in groups of two
    a_slot = 4 * (5 * (BLOCK + 1) + (BLOCK + 1) // 2)
    assert opened(engine, 3).memory_bytes == Session(engine, slots=3).memory_bytes + 3 * a_slot


def new_device(engine: Engine, kind: str) -> Device:
    """Either device, with memory of its own; nothing is launched."""
    if kind == "cpu":
        states = States.allocate(engine.manifest, SLOTS, CONTEXT)
        return CpuDevice(engine, states, saved_tokens=BLOCK + 1)
    driver = HostDriver(engine, interpret=False)
    return CudaDevice(engine, driver, SLOTS, CONTEXT, saved_tokens=BLOCK + 1)  # type: ignore[arg-type]


def written(engine: Engine, states: dict[str, Array], slot: int, positions: range) -> dict[str, Array]:
    """States after tokens at some positions, by the rule of `StateEntry` spelled out."""
    after = {name: state.copy() for name, state in states.items()}
    for entry in engine.manifest.states:
        for position in positions:
            length = entry.shape[1]
            if isinstance(length, int):
                after[entry.name][slot, position % length] = 1000 + position
            elif position % 2 == 1:
                after[entry.name][slot, position // 2] = 1000 + position
    return after


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@settings(max_examples=30, deadline=None)
@given(
    begins=st.tuples(st.integers(0, 50), st.integers(0, 50)),
    counts=st.tuples(st.integers(0, BLOCK + 1), st.integers(0, BLOCK + 1)),
    kept=st.tuples(st.integers(0, BLOCK + 1), st.integers(0, BLOCK + 1)),
    slots=st.permutations(range(SLOTS)),
)
def test_devices_put_back_the_rows_of_positions_and_no_others(
    engine: Engine,
    kind: str,
    begins: tuple[int, int],
    counts: tuple[int, int],
    kept: tuple[int, int],
    slots: list[int],
) -> None:
    device, random = new_device(engine, kind), np.random.default_rng(begins)
    names = [entry.name for entry in engine.manifest.states]

    def put(states: dict[str, Array]) -> None:
        for name, state in states.items():
            for slot in range(SLOTS):
                device.put_rows(name, slot, 0, state[slot])

    before = {name: random.integers(0, 1000, device.state(name).shape, np.int32) for name in names}
    put(before)
    after, wanted = before, before
    for slot, begin, count, rest in zip(slots, begins, counts, kept, strict=False):
        device.save(slot, begin, begin + count)
        after = written(engine, after, slot, range(begin, begin + count))
        wanted = written(engine, wanted, slot, range(begin, begin + min(rest, count)))
    put(after)
    for slot, begin, count, rest in zip(slots, begins, counts, kept, strict=False):
        device.restore(slot, begin + min(rest, count))
    for name in names:
        np.testing.assert_array_equal(device.state(name), wanted[name], name)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_devices_refuse_what_they_cannot_remember(engine: Engine, kind: str) -> None:
    device = new_device(engine, kind)
    with pytest.raises(ContextError, match="save: expected at most 4 positions, got 3 to 8"):
        device.save(0, 3, 8)
    device.save(0, 3, 6)
    for slot, begin, within in ((0, 2, "3 to 6"), (0, 7, "3 to 6"), (1, 3, "0 to 0")):
        with pytest.raises(ContextError, match=f"restore: slot {slot}: expected a position within {within}, got"):
            device.restore(slot, begin)


@given(
    begin=st.integers(0, 50), count=st.integers(0, BLOCK + 1), kept=st.integers(0, BLOCK + 1), state=st.integers(0, 5)
)
def test_pieces_are_the_rows_of_the_positions(engine: Engine, begin: int, count: int, kept: int, state: int) -> None:
    """Against the rule spelled out: position by position, each row at its place."""
    kept = min(kept, count)
    dims = {"S": 1, **capacities(engine.manifest.dims, CONTEXT)}
    rows = Journal(engine.manifest, dims, BLOCK + 1).rows[state]
    wanted = {}
    for position in range(begin + kept, begin + count):
        if (position + 1) % rows.ratio == 0:
            row = position // rows.ratio
            wanted[row % rows.length] = row - begin // rows.ratio
    found = {}
    pieces = list(rows.pieces(range(begin, begin + count), begin + kept))
    for place, copy, size in pieces:
        for byte in range(0, size, rows.row_bytes):
            found[(place + byte) // rows.row_bytes] = (copy - rows.offset + byte) // rows.row_bytes
    assert found == wanted
    assert len(pieces) <= 2
