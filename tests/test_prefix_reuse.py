"""Engines that begin with stored prefixes: held against themselves, and against the eager model's own replay."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from v41c.frontend.loading import load as load_model
from v41c.frontend.model import Model
from v41c.frontend.presets import TRAINED_CHECKPOINT
from v41c.runtime.artifact import Engine, load
from v41c.runtime.pool import Pool
from v41c.runtime.prefix_store import PrefixStore
from v41c.runtime.reuse import Reuse, Reused
from v41c.runtime.session import Session
from v41c.runtime.states import row_kinds
from v41c.runtime.steps import Floats

EngineOf = Callable[[Path, str], Path]
CASES = {
    "tiny-v41": TRAINED_CHECKPOINT,  # ratios 2 and 1, Engram, a window of 32
    "case_02": Path(__file__).parent / "data" / "golden" / "case_02",  # ratios 4 and 1, a window of 8
}
slow_to_begin = settings(
    max_examples=5, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@cache
def eager(name: str) -> Model:
    """A case's eager model in exact arithmetic."""
    return load_model(CASES[name], "exact")


@pytest.fixture
def release(engine_of: EngineOf) -> Engine:
    """The shipped model in the release's arithmetic."""
    return load(engine_of(TRAINED_CHECKPOINT, "release"))


def tokens_of(engine: Engine, count: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(5, engine.manifest.vocabulary - 4, count).astype(np.int32)


def saved(engine: Engine, folder: Path, tokens: np.ndarray) -> PrefixStore:
    """A store with a sequence that another session fed."""
    session, store = Session(engine), PrefixStore(folder, engine.manifest)
    session.prefill(tokens, mode="full")
    Reuse(session, store).end(tokens)
    return store


def resumed(
    session: Session, store: PrefixStore, tokens: np.ndarray, mode: str, pool: Pool | None = None
) -> tuple[Floats, Reused]:
    """Logits of every token that the decoder ran over, and what was reused; its global rows must stay as they are."""
    reused = Reuse(session, store, pool).begin(tokens, mode=mode)
    before = global_rows(session, reused.cached_tokens)
    logits = session.prefill_all(tokens[session.length() :], mode=mode)
    for name, rows in global_rows(session, reused.cached_tokens).items():
        np.testing.assert_array_equal(rows, before[name], name)
    return logits, reused


def global_rows(session: Session, tokens: int) -> dict[str, np.ndarray]:
    """Bytes of the global rows of a sequence's first tokens."""
    kinds = row_kinds(session.engine.manifest)
    return {kind.name: session.rows(kind.name, 0, 0, tokens // kind.ratio).view(np.uint8) for kind in kinds}


def replayed(model: Model, tokens: np.ndarray, cached: int, start: int) -> np.ndarray:
    """Logits [N − start, V] of the eager model for the same replay: local states are NaN before it."""
    ids = torch.from_numpy(tokens)
    states = model.new_states(1, len(tokens) + 8)
    if cached:
        model(ids[:cached], states)
    for name, state in states.items():
        if not name.endswith((".compressed", ".index_keys")):
            state.fill_(torch.nan if state.is_floating_point() else -7)
    if "engram.history" in states:
        history = states["engram.history"][0]
        for position in range(max(0, start - len(history)), start):
            history[position % len(history)] = model.compressed_ids[tokens[position]]
    positions = torch.arange(start, len(tokens), dtype=torch.int32)
    rows, slots = torch.arange(len(positions), dtype=torch.int32), torch.zeros_like(positions)
    first, kept = torch.full_like(positions, start), torch.full_like(positions, cached)
    return model.step(ids[start:], positions, slots, first, rows, states, kept=kept)[0].numpy()


# hits in units of the window: none, shorter than it, at its edges, in a group, one token before the end
@slow_to_begin
@example(kept=3.0, beyond=1)
@example(kept=0.55, beyond=20)
@given(kept=st.floats(0, 3), beyond=st.integers(1, 40))
@pytest.mark.parametrize("name", CASES)
def test_a_replay_is_the_eager_model_s(
    name: str, engine_of: EngineOf, tmp_path_factory: pytest.TempPathFactory, kept: float, beyond: int
) -> None:
    engine, model = load(engine_of(CASES[name], "exact")), eager(name)
    window = engine.manifest.window
    length = int(kept * window) + 1
    tokens = tokens_of(engine, length + beyond, seed=length)
    store = saved(engine, tmp_path_factory.mktemp("store"), tokens[:length])
    session = Session(engine, poison=True)
    logits, reused = resumed(session, store, tokens, "full")
    cached = store.aligned(min(length, len(tokens) - 1))
    start = max(0, cached - window)
    assert reused == Reused(cached, cached - start)
    assert session.block_evaluations == model.config.n_layers * (len(tokens) - start)
    wanted = replayed(model, tokens, cached, start)
    assert np.abs(logits - wanted).max() <= 1e-5 * np.abs(wanted).max()


@slow_to_begin
@example(kept=31, beyond=50, mode="ced")
@given(kept=st.integers(0, 33), beyond=st.integers(1, 60), mode=st.sampled_from(["ced", "full"]))
def test_within_the_window_nothing_changes(
    release: Engine, tmp_path_factory: pytest.TempPathFactory, kept: int, beyond: int, mode: str
) -> None:
    tokens = tokens_of(release, kept + beyond, seed=kept)
    session, alone = (Session(release, poison=True) for _ in range(2))
    wanted = alone.prefill_all(tokens, mode=mode)
    store = PrefixStore(tmp_path_factory.mktemp("store"), release.manifest)
    if kept:
        store = saved(release, store.folder, tokens[:kept])
    logits, reused = resumed(session, store, tokens, mode)
    assert reused.cached_tokens == min(kept, len(tokens) - 1) // 2 * 2
    np.testing.assert_array_equal(logits, wanted)
    for name, state in alone.states.items():
        np.testing.assert_array_equal(session.states[name].view(np.uint8), state.view(np.uint8), name)


@pytest.mark.parametrize("first", [5, 40, 69, 96])
@pytest.mark.parametrize("mode", ["ced", "full"])
def test_a_live_sequence_goes_on_to_the_last_bit(release: Engine, tmp_path: Path, first: int, mode: str) -> None:
    tokens = tokens_of(release, first + 50)
    alone, session = Session(release, poison=True), Session(release, poison=True)
    store, pool = PrefixStore(tmp_path, release.manifest), Pool()
    resumed(session, store, tokens[:first], mode, pool)
    Reuse(session, store, pool).end(tokens[:first])
    before = session.block_evaluations
    logits, reused = resumed(session, store, tokens, mode, pool)
    alone.prefill(tokens[:first], mode=mode)
    np.testing.assert_array_equal(logits, alone.prefill_all(tokens[first:], mode=mode))
    assert reused == Reused(first)
    decoded = 50 if mode == "full" else 32
    assert session.block_evaluations - before == 6 * 50 + 6 * decoded
    if mode == "full":
        np.testing.assert_array_equal(logits, Session(release).prefill_all(tokens, mode="full")[first:])


def test_a_long_prompt_costs_what_the_schedule_says(release: Engine, tmp_path: Path) -> None:
    tokens = tokens_of(release, 300)
    store = saved(release, tmp_path, tokens[:201])
    session = Session(release, poison=True)
    _, reused = resumed(session, store, tokens, "ced")
    assert reused == Reused(200, 32)
    assert session.block_evaluations == 6 * (32 + 300 - 200) + 6 * 32
