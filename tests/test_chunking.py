"""Any cut of a prompt into chunks is the same prompt to an engine, to the last bit of its logits and caches.

So are tokens between which others were verified and taken back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.rewinding import play
from v41c.frontend.presets import TRAINED_CHECKPOINT
from v41c.runtime.artifact import Engine, load
from v41c.runtime.session import Session, Tokens
from v41c.runtime.steps import Floats

GOLDEN = Path(__file__).parent / "data" / "golden"
CASES = [(TRAINED_CHECKPOINT, "release"), (GOLDEN / "case_00", "release"), (GOLDEN / "case_02", "exact")]
ENGINES = [pytest.param(*case, id=f"{case[0].name}-{case[1]}") for case in CASES]
EngineOf = Callable[[Path, str], Path]


def fed(engine: Engine, tokens: Tokens, chunks: Sequence[int], threads: int | None = None) -> tuple[Floats, Session]:
    """Logits of the last token after a full prefill in chunks; memory that no token has written holds NaN."""
    session, begin = Session(engine, poison=True, threads=threads), 0
    logits: Floats = np.empty(0, np.float32)
    for count in chunks:
        logits = session.prefill(tokens[begin : begin + count], mode="full")
        begin += count
    assert begin == len(tokens)
    return logits, session


@pytest.mark.parametrize(("checkpoint", "arithmetic"), ENGINES)
@settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(chunks=st.lists(st.integers(1, 70), min_size=1, max_size=5), seed=st.integers(0, 99))
def test_any_cut(checkpoint: Path, arithmetic: str, engine_of: EngineOf, chunks: list[int], seed: int) -> None:
    engine = load(engine_of(checkpoint, arithmetic))
    tokens = np.random.default_rng(seed).integers(5, engine.manifest.vocabulary - 4, sum(chunks))
    wanted, whole = fed(engine, tokens, [len(tokens)])
    found, parts = fed(engine, tokens, chunks)
    np.testing.assert_array_equal(found, wanted)
    for name, state in whole.states.items():
        np.testing.assert_array_equal(parts.states[name].view(np.uint8), state.view(np.uint8), name)


@pytest.mark.parametrize(("checkpoint", "arithmetic"), ENGINES)
def test_one_token_at_a_time_is_decoding(checkpoint: Path, arithmetic: str, engine_of: EngineOf) -> None:
    engine = load(engine_of(checkpoint, arithmetic))
    window = engine.manifest.window
    tokens = np.random.default_rng(1).integers(5, engine.manifest.vocabulary - 4, window + 9)
    wanted, whole = fed(engine, tokens, [len(tokens)])
    session = Session(engine, poison=True)
    for token in tokens:
        found = session.decode(int(token))
    np.testing.assert_array_equal(found, wanted)
    for name, state in whole.states.items():
        np.testing.assert_array_equal(session.states[name].view(np.uint8), state.view(np.uint8), name)


@pytest.mark.parametrize(("checkpoint", "arithmetic"), ENGINES)
def test_logits_of_every_token_are_those_of_the_last_ones(
    checkpoint: Path, arithmetic: str, engine_of: EngineOf
) -> None:
    engine = load(engine_of(checkpoint, arithmetic))
    tokens = np.random.default_rng(2).integers(5, engine.manifest.vocabulary - 4, 83)
    every = Session(engine).prefill_all(tokens, mode="full")
    for count in (1, 2, 17, 64, 83):
        np.testing.assert_array_equal(Session(engine).prefill(tokens[:count], mode="full"), every[count - 1])


@pytest.mark.parametrize(("checkpoint", "arithmetic"), ENGINES[:2])
@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 99))
def test_a_verification_that_is_taken_back(checkpoint: Path, arithmetic: str, engine_of: EngineOf, seed: int) -> None:
    """Odd positions, rings that begin again, several slots: enough rounds to fill every ring."""
    engine = load(engine_of(checkpoint, arithmetic))
    session, plain = (Session(engine, slots=2, drafting=True, poison=True) for _ in range(2))
    for differing in play(session, plain, seed, rounds=24):
        assert not differing
    np.testing.assert_array_equal(session.step({0: [7], 1: [8, 9]}), plain.step({0: [7], 1: [8, 9]}))


def test_threads_do_not_change_a_bit(engine_of: EngineOf) -> None:
    engine = load(engine_of(TRAINED_CHECKPOINT, "release"))
    tokens = np.random.default_rng(3).integers(5, 2000, 75)
    logits = [fed(engine, tokens, [40, 35], threads=threads)[0] for threads in (1, 2, 3)]
    np.testing.assert_array_equal(logits[0], logits[1])
    np.testing.assert_array_equal(logits[0], logits[2])
