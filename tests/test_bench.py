"""Benchmarks: the baselines compute the model, the figures follow from what was measured, the report is complete."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.vision_model import checkpoint_and_engine
from v41c.baseline import Baseline
from v41c.bench import EAGER, ENGINE, BenchOptions, bench, ratios
from v41c.costs import Cost, engine_costs
from v41c.errors import ContextError, UsageError
from v41c.frontend import load as load_model
from v41c.frontend.presets import TRAINED_CHECKPOINT
from v41c.machine import Limits, Machine
from v41c.runtime.artifact import load
from v41c.runtime.profile import some_tokens
from v41c.runtime.session import Session
from v41c.verdict import relative_l2

EngineOf = Callable[[Path, str], Path]
SHORT = BenchOptions(prefill_tokens=(48, 96), context=64, decode_steps=4, rounds=1)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the figures do not matter: half a gigabyte need not be read, nor threads be tried that others hold up."""
    monkeypatch.setattr("v41c.bench.Limits", lambda: Limits(buffer_bytes=1 << 20, matrix=64))
    monkeypatch.setattr("v41c.bench.processors", lambda: 1)


def test_the_report_holds_every_ratio(engine_of: EngineOf) -> None:
    report = bench(engine_of(TRAINED_CHECKPOINT, "release"), (EAGER,), options=SHORT)
    assert set(report.ratios) >= {
        "decode_vs_eager",
        "decode_vs_compile",
        "prefill_48_vs_eager",
        "prefill_48_vs_eager_ced",
        "prefill_96_vs_eager",
        "decode_bandwidth_fraction",
        "prefill_arithmetic_fraction",
    }
    measured = {name for name, value in report.ratios.items() if value is not None}
    assert measured == {name for name in report.ratios if not name.endswith("compile")}
    assert json.loads(json.dumps(report.to_json()))["ratios"]["decode_vs_compile"] is None
    assert set(report.torch_threads.values()) == {1}
    # an engine below half the speed of eager PyTorch would be no engine: measured 50 times as fast
    assert (report.ratios["decode_vs_eager"] or 0) > 2
    text = report.summary()
    assert all(name in text for name in measured)


def test_an_engine_alone_is_measured_without_torch_models(engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("v41c.baseline.Baseline", None)
    report = bench(engine_of(TRAINED_CHECKPOINT, "release"), options=replace(SHORT, prefill_tokens=(16,)))
    assert set(report.tokens_per_second) == {ENGINE}
    assert set(report.tokens_per_second[ENGINE]) == {"prefill_16", "prefill_16_full", "decode"}


def test_a_batch_is_measured_beside_a_single_sequence(engine_of: EngineOf) -> None:
    engine = engine_of(TRAINED_CHECKPOINT, "release")
    report = bench(engine, options=replace(SHORT, prefill_tokens=(16,), batch=3))
    speeds = report.tokens_per_second[ENGINE]
    assert report.ratios["decode_batch_vs_decode"] == speeds["decode_batch"] / speeds["decode"]
    assert "decode_batch_vs_decode" in report.summary()
    with pytest.raises(ContextError, match="slots: expected 1 to 8, what the engine was compiled for, got 9"):
        bench(engine, options=replace(SHORT, prefill_tokens=(16,), batch=9))


def test_drafts_are_measured_beside_the_same_texts_without(engine_of: EngineOf) -> None:
    engine = engine_of(TRAINED_CHECKPOINT, "release")
    report = bench(engine, options=replace(SHORT, prefill_tokens=(16,), draft=3, drafted=20))
    speeds = report.tokens_per_second[ENGINE]
    assert report.ratios["text_drafted_vs_text"] == speeds["text_drafted"] / speeds["text"]
    assert "text_drafted_vs_text" in report.summary()
    with pytest.raises(UsageError, match="draft: expected at most 5 tokens"):
        bench(engine, options=replace(SHORT, prefill_tokens=(16,), draft=6, drafted=20))


def test_the_default_needs_a_context_that_holds_it(engine_of: EngineOf) -> None:
    with pytest.raises(ContextError, match=r"context: expected at least 2192 tokens to measure in, got 512: compile"):
        bench(engine_of(TRAINED_CHECKPOINT, "release"))


def test_a_foreign_checkpoint_is_no_baseline(engine_of: EngineOf) -> None:
    case = Path(__file__).parent / "data" / "golden" / "case_02"
    with pytest.raises(UsageError, match="expected the checkpoint of"):
        bench(engine_of(TRAINED_CHECKPOINT, "release"), (EAGER,), case, SHORT)


def test_ratios_follow_from_what_was_measured() -> None:
    speeds = {
        "engine": {"decode": 100.0, "prefill_512": 400.0, "prefill_2048": 300.0},
        "eager": {"decode": 10.0, "prefill_512": 100.0, "prefill_512_ced": 200.0},
        "compile": {"decode": 20.0},
    }
    costs = {"decode": Cost(0, 50), "prefill_512": Cost(1, 1), "prefill_2048": Cost(2048 * 7, 0)}
    assert ratios(speeds, costs, Machine(2, 20_000.0, 4200.0)) == {
        "decode_vs_eager": 10.0,
        "decode_vs_compile": 5.0,
        "prefill_512_vs_eager": 4.0,
        "prefill_512_vs_eager_ced": 2.0,
        "prefill_512_vs_compile": None,
        "prefill_2048_vs_eager": None,
        "prefill_2048_vs_eager_ced": None,
        "prefill_2048_vs_compile": None,
        "decode_bandwidth_fraction": 100.0 * 50 / 20_000.0,
        "prefill_arithmetic_fraction": 300.0 * 7 / 4200.0,
    }


def test_the_baseline_is_the_model(engine_of: EngineOf) -> None:
    """It is the exact model, every weight dequantised; its ced schedule is that of the engine."""
    engine = load(engine_of(TRAINED_CHECKPOINT, "exact"))
    tokens = some_tokens(engine, 77)
    ids = torch.from_numpy(tokens)
    baseline = Baseline(TRAINED_CHECKPOINT)
    full = baseline.full(ids, baseline.new_states(96)).numpy()
    with torch.inference_mode():
        # the head's product over one row sums in another order than over all: measured 2e-7
        assert relative_l2(full, load_model(str(TRAINED_CHECKPOINT), "exact")(ids)[-1].numpy()) < 1e-6
    states = baseline.new_states(96)
    ced = baseline.ced(ids, states).numpy()
    session = Session(engine)
    # the criterion of golden tensors in exact arithmetic; the window is 32, so that full is another result
    assert relative_l2(ced, session.prefill(tokens, mode="ced")) < 1e-4 < relative_l2(ced, full)
    step = baseline.full(ids[:1], states, len(tokens)).numpy()
    assert relative_l2(step, session.decode(int(tokens[0]))) < 1e-4


def test_costs_follow_the_schedule(engine_of: EngineOf) -> None:
    engine = load(engine_of(TRAINED_CHECKPOINT, "release"))
    costs = engine_costs(engine, (32, 64), 256)
    # beyond the window of 32 only the encoder, half of the layers and no head, sees the tokens
    assert 1.4 < costs["prefill_64"].flops / costs["prefill_32"].flops < 1.7
    # a decode step reads what it needs of the weights, and the experts that are not chosen stay where they are
    stored = sum(weight.size_bytes for weight in engine.manifest.weights)
    assert 0.2 * stored < costs["decode"].traffic_bytes < 0.6 * stored


def test_tokens_are_ordinary_and_always_the_same(engine_of: EngineOf) -> None:
    engine = load(engine_of(TRAINED_CHECKPOINT, "release"))
    tokens = some_tokens(engine, 4000)
    assert tokens.dtype == np.int32
    assert np.array_equal(tokens, some_tokens(engine, 4000))
    assert len(set(tokens.tolist())) > 1500
    assert tokens.min() >= 5  # begin, end, pad, image and noise
    assert tokens.max() < 2048


def test_images_are_measured_where_there_is_a_tower(tmp_path: Path) -> None:
    checkpoint, engine = checkpoint_and_engine(tmp_path)
    report = bench(engine, (EAGER,), checkpoint, options=replace(SHORT, prefill_tokens=(16,), context=32))
    images = report.images_per_second
    assert images.keys() == {ENGINE, EAGER}
    assert report.ratios["images_vs_eager"] == images[ENGINE] / images[EAGER]
    assert all("images" not in speeds for speeds in report.tokens_per_second.values())
    assert "images per second" in report.summary()
