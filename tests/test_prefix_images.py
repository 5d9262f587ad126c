"""Prompts with images that begin like earlier ones: hits before, between and inside the spans of images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import v41c.frontend
from tests.variants import compile_variants
from tests.vision_model import IMAGE, checkpoint_and_engine, picture, placed
from v41c.frontend.model import Model
from v41c.runtime.artifact import Engine, load
from v41c.runtime.pool import Pool
from v41c.runtime.prefix_store import PrefixStore
from v41c.runtime.reuse import Reuse, Reused
from v41c.runtime.session import Session
from v41c.runtime.vision import ImagePrompt, with_images

WINDOW = 16
#: a KV source with a ratio, another behind it, and an Engram, whose look-back ends at images
SOURCES = {
    **{"n_layers": 3, "window_size": WINDOW, "compress_ratios": [0, 2, 1], "kv_source_layers": [1, 2]},
    **{"index_source_layers": [1, 2], "index_n_heads": 1, "index_head_dim": 32, "index_topk": 8},
    **{"compress_rope_theta": 160000.0, "original_seq_len": 64, "rope_factor": 16, "beta_fast": 32, "beta_slow": 1},
    **{"engram_layer_ids": [1], "engram_num_embeddings": [304], "engram_max_ngram_size": 4, "engram_vocab_size": 40},
    **{"engram_n_heads": 2, "engram_head_dim": 32, "engram_pad_id": 2, "engram_compressed_vocab_size": 420},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    with pytest.MonkeyPatch.context() as patch:
        compile_variants(patch, (24,))
        return checkpoint_and_engine(tmp_path_factory.mktemp("prefix"), "exact", SOURCES)


@pytest.fixture(scope="module")
def engine(folders: tuple[Path, Path]) -> Engine:
    return load(folders[1])


@pytest.fixture(scope="module")
def model(folders: tuple[Path, Path]) -> Model:
    return v41c.frontend.load(str(folders[0]), "exact")


def prompt(engine: Engine, first: int, second: int) -> ImagePrompt:
    """Text, the span of an image at 3 to 10, text, another at 13 to 20, text: 26 tokens."""
    given = with_images(
        [0, 7, 8, IMAGE, 9, 10, IMAGE, 11, 12, 13, 14, 15],
        [picture(seed, 60, 60) for seed in (first, second)],
        engine,
    )
    assert [(image.begin, image.end) for image in given.images] == [(3, 11), (13, 21)]
    return given


def store_of(engine: Engine, folder: Path, *prompts: ImagePrompt) -> PrefixStore:
    """What other sequences left, one after the other."""
    store = PrefixStore(folder, engine.manifest)
    for each in prompts:
        session = Session(engine)
        session.prefill(each, mode="full")
        Reuse(session, store).end(each)
    return store


def resumed(engine: Engine, store: PrefixStore, given: ImagePrompt, mode: str) -> tuple[np.ndarray, Reused, Session]:
    """Logits of all tokens that were fed, and what was reused."""
    session = Session(engine, poison=True)
    reused = Reuse(session, store).begin(given, mode=mode)
    return session.prefill_all(given[session.length() :], mode=mode), reused, session


@pytest.mark.parametrize("mode", ["full", "ced"])
@pytest.mark.parametrize(
    ("seeds", "kept", "cached"),
    [
        ((1, 3), 26, 12),  # another second image: as far as the token before its span
        ((2, 1), 26, 2),  # another first one
        ((1, 2), 6, 6),  # what was kept ends inside the first span: after its start and two rows of the tower
        ((1, 3), 9, 8),  # there too, within a group
        ((1, 2), 16, 16),  # inside the second span
    ],
)
def test_within_the_window_nothing_changes(
    engine: Engine, tmp_path: Path, seeds: tuple[int, int], kept: int, cached: int, mode: str
) -> None:
    given = prompt(engine, *seeds)
    store = store_of(engine, tmp_path, prompt(engine, 1, 2)[:kept])
    logits, reused, session = resumed(engine, store, given, mode)
    assert reused == Reused(cached, cached)
    alone = Session(engine, poison=True)
    np.testing.assert_array_equal(logits, alone.prefill_all(given, mode=mode))
    for name, state in alone.states.items():
        np.testing.assert_array_equal(session.states[name].view(np.uint8), state.view(np.uint8), name)


@pytest.mark.parametrize("kept", [18, 21, 24])
def test_a_replay_that_begins_inside_a_span_is_the_eager_models(
    engine: Engine, model: Model, tmp_path: Path, kept: int
) -> None:
    """The replay begins at positions 2, 4 and 8, of which the last two are inside the first image."""
    given = prompt(engine, 1, 2)
    logits, reused, _ = resumed(engine, store_of(engine, tmp_path, given[:kept]), given, "full")
    cached = kept // 2 * 2
    start = cached - WINDOW
    assert reused == Reused(cached, WINDOW)
    wanted = replayed(model, given, cached, start)
    assert np.abs(logits - wanted).max() <= 1e-5 * np.abs(wanted).max()


def replayed(model: Model, given: ImagePrompt, cached: int, start: int) -> np.ndarray:
    """Logits [N - start, V] of the eager model for the same replay: local states are NaN before it."""
    ids, states = torch.from_numpy(given.tokens), model.new_states(1, len(given) + 8)
    codes, values = placed(model, given)
    with torch.inference_mode():
        model(ids[:cached], states, images=(codes[:cached], values))
        for name, state in states.items():
            if not name.endswith((".compressed", ".index_keys")):
                state.fill_(torch.nan if state.is_floating_point() else -7)
        history = states["engram.history"][0]
        for position in range(max(0, start - len(history)), start):
            inside = given.tokens[position] == IMAGE
            history[position % len(history)] = -1 if inside else model.compressed_ids[given.tokens[position]]
        positions = torch.arange(start, len(given), dtype=torch.int32)
        rows, slots = torch.arange(len(positions), dtype=torch.int32), torch.zeros_like(positions)
        first, kept = torch.full_like(positions, start), torch.full_like(positions, cached)
        images = {"image_rows": codes[start:], "image_values": values}
        return model.step(ids[start:], positions, slots, first, rows, states, kept=kept, **images)[0].numpy()


def test_the_same_images_go_on_where_they_stood(engine: Engine, tmp_path: Path) -> None:
    """With what is left of the local state nothing is replayed; another second image finds none of it."""
    given, session = prompt(engine, 1, 2), Session(engine)
    reuse = Reuse(session, PrefixStore(tmp_path, engine.manifest), Pool())
    session.prefill(given[:22], mode="full")
    reuse.end(given[:22])
    assert reuse.begin(given, mode="full") == Reused(22)
    logits = session.prefill_all(given[22:], mode="full")
    np.testing.assert_array_equal(logits, Session(engine).prefill_all(given, mode="full")[22:])
    assert reuse.begin(prompt(engine, 1, 3), mode="full") == Reused(12, 12)
