"""Engines of bf16 checkpoints quantised on the way: those of the stored quantised checkpoint, and what they say."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.stored import write_bf16, write_quantized
from tests.traced import FOLDERS, context, traced
from v41c.cli import main
from v41c.compare import compare
from v41c.compile import CompileOptions, Source, pass_context, quantized_source, read_source
from v41c.errors import CheckpointError
from v41c.frontend.checkpoint import Checkpoint
from v41c.frontend.quantized_checkpoint import QuantizedCheckpoint, quantized_config, quantized_types
from v41c.frontend.weights import array_reader, piece_reader
from v41c.inspect import inspect
from v41c.passes import quantize, remove_quantization
from v41c.quantization import QuantizedWeight, quantization_text
from v41c.runtime.artifact import load
from v41c.runtime.session import Session
from v41c.targets.target import find_target
from v41c.traces import kept_trace

BF16 = FOLDERS["case_02"]
Engines = Callable[..., Path]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bf16 checkpoint, quantised first."""
    return write_quantized(BF16, tmp_path_factory.mktemp("stored") / "quantized")


@pytest.fixture(scope="module")
def engine(engine_of: Engines) -> Path:
    """The bf16 checkpoint, quantised on the way."""
    return engine_of(BF16, "release", "+quantize")


def test_the_engine_is_that_of_the_stored_checkpoint(engine: Path, stored: Path, engine_of: Engines) -> None:
    other = engine_of(stored)
    for file in ("weights.bin", "kernels/kernels.so"):
        assert (engine / file).read_bytes() == (other / file).read_bytes(), file
    ours, theirs = load(engine).manifest, load(other).manifest
    for field in ("weights", "programs", "states", "dims"):
        assert getattr(ours, field) == getattr(theirs, field), field
    assert [entry.name for entry in ours.passes if entry not in theirs.passes] == ["trace", "quantize"]
    assert ours.config == traced("case_02")[0].config.to_flat()


@pytest.mark.parametrize("arithmetic", ["release", "exact"])
def test_every_weight_is_read_as_it_would_be_stored(arithmetic: str, stored: Path) -> None:
    """Twice the same; what the trace before the pass holds as bf16 is read as bf16 still."""
    source, module = traced("case_02")
    given = replace(context(arithmetic), quantized=quantized_types(source.config))  # type: ignore[arg-type]
    after = remove_quantization.run(quantize.run(module, given), given)
    made = piece_reader(QuantizedCheckpoint(BF16, source.config), None)
    read = array_reader(Checkpoint(stored), None)
    for value in (value for graph in after for value in graph.weights):
        wanted = read(value)
        for _ in range(2):
            found = np.concatenate(list(made(value)))
            assert found.dtype == wanted.dtype
            assert found.tobytes() == wanted.tobytes(), value.name
    original = array_reader(Checkpoint(BF16), None)
    for value in (value for graph in module for value in graph.weights):
        assert np.concatenate(list(made(value))).tobytes() == original(value).tobytes(), value.name


def test_a_table_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_bf16(FOLDERS["case_04"], tmp_path / "bf16")
    name = "layers.1.engram.embed.weight"
    checkpoint = QuantizedCheckpoint(source, traced_bf16(source).config)
    whole = checkpoint.tensor(name).view(torch.uint8)
    fidelity = checkpoint.fidelity[name]
    monkeypatch.setattr("v41c.frontend.quantized_checkpoint._PIECE", 32 * 32)
    pieces = list(checkpoint.pieces(name))
    assert len(pieces) > 3
    assert torch.equal(torch.cat([piece.view(torch.uint8) for piece in pieces]), whole)
    assert checkpoint.fidelity[name] == fidelity  # of values that are stored without loss: nothing


def traced_bf16(folder: Path) -> Source:
    return read_source(folder, no_weights=False)


@pytest.mark.parametrize("case", sorted(FOLDERS.keys() - {"case_02"}))
def test_nothing_is_quantised_twice(case: str) -> None:
    """The tensors of a checkpoint in release formats, bit for bit."""
    given = read_source(FOLDERS[case], no_weights=False)
    source = quantized_source(given)
    assert isinstance(source.checkpoint, QuantizedCheckpoint)
    plain = Checkpoint(FOLDERS[case])
    assert set(source.checkpoint) == set(plain)
    for name in plain:
        assert source.checkpoint.spec(name) == plain.spec(name)
        assert torch.equal(source.checkpoint.tensor(name).view(torch.uint8), plain.tensor(name).view(torch.uint8))
    assert source.checkpoint.fidelity == {}
    given_context = pass_context(given.config, CompileOptions(passes="+quantize"), find_target("cpu"), {})
    module = kept_trace(given)
    assert quantize.run(module, given_context) is module


def test_the_quantised_checkpoint_is_complete(stored: Path) -> None:
    config = read_source(BF16, no_weights=False).config
    QuantizedCheckpoint(BF16, config).verify(quantized_config(config))
    Checkpoint(stored).verify(quantized_config(config))


def test_not_a_number_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "bad"
    shutil.copytree(BF16, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["layers.2.ffn.experts.3.w2.weight"][5, 6] = torch.nan
    save_file(tensors, folder / "model.safetensors")
    source = quantized_source(read_source(folder, no_weights=False))
    assert source.checkpoint is not None
    with pytest.raises(
        CheckpointError, match=r"layers\.2\.ffn\.experts\.3\.w2\.weight\[5, 6\]: expected finite numbers"
    ):
        source.checkpoint.stack("layers.2.ffn.experts.{}.w2.weight", 8)


def test_inspect_shows_every_weight(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = inspect(engine)
    checkpoint = QuantizedCheckpoint(BF16, traced("case_02")[0].config)
    assert {weight.name for weight in report.quantization} == {
        name for name in Checkpoint(BF16) if name in checkpoint and checkpoint.spec(name).dtype in ("I8", "F8_E4M3")
    }
    for weight in report.quantization:
        assert weight.snr_db is not None
        low, high = (17, 21) if weight.format == "fp4" else (30, 33)  # derived in test_quantize_bf16
        assert low < weight.snr_db < high, weight
        assert weight.relative_error == pytest.approx(10 ** (-weight.snr_db / 20), rel=5e-3)
    assert quantization_text(report.quantization) in report.summary()
    assert main(["inspect", str(engine), "--layer", "1", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["quantization"]
    assert {entry["name"].split(".")[1] for entry in listed} == {"1"}


def test_the_table_has_a_row_for_every_kind() -> None:
    weights = [
        QuantizedWeight("layers.0.ffn.experts.3.w1.weight", "fp4", 18.25, 0.122),
        QuantizedWeight("layers.10.ffn.experts.12.w1.weight", "fp4", 19.0, 0.112),
        QuantizedWeight("layers.2.attn.wq_a.weight", "fp8", None, 0.0),
    ]
    assert quantization_text(weights).splitlines() == [
        "quantised       format  weights  worst SNR  median SNR  worst rel. error",
        "--------------  ------  -------  ---------  ----------  ----------------",
        "ffn.experts.w1     fp4        2    18.2 dB     18.2 dB              0.12",
        "attn.wq_a          fp8        1      exact       exact                 0",
        "worst: layers.0.ffn.experts.3.w1.weight 18.2 dB, layers.10.ffn.experts.12.w1.weight 19.0 dB",
    ]


def test_compare_shows_what_it_costs_and_judges_nothing(engine: Path, engine_of: Engines) -> None:
    report = compare(engine, checkpoint=BF16, prompt_tokens=24, decode_steps=3)
    assert report.passed
    rows = {(row.phase, row.subject.partition(":")[0]): row for row in report.quantized}
    assert set(rows) == {
        ("prefill", "the same weights, interpreted"),
        *((phase, subject) for phase in ("prefill", "decode") for subject in ("engine", "floor")),
    }
    ours, same, floor = (rows["prefill", name] for name in ("engine", "the same weights, interpreted", "floor"))
    assert len(ours.kl_nats) == 24
    # the cost is of the weights, not of the kernels: far above the floor, and the interpreter's
    assert min(np.mean(ours.kl_nats), np.mean(same.kl_nats)) > 5 * np.mean(floor.kl_nats)
    assert np.mean(ours.kl_nats) == pytest.approx(np.mean(same.kl_nats), rel=0.5)
    assert report.phases[0].logits is not None
    assert np.mean(ours.kl_nats) == pytest.approx(report.phases[0].logits.kl_nats)
    assert "quantised weights against the model as stored" in report.summary()
    plain = compare(engine_of(BF16), checkpoint=BF16, prompt_tokens=24, decode_steps=3)
    assert plain.quantized == []


def test_golden_tensors_of_the_unquantised_model_judge_it_not(engine: Path) -> None:
    report = compare(engine, golden=BF16)
    assert report.passed
    ours = [verdict for verdict in report.verdicts if verdict.subject.startswith("engine")]
    assert ours
    assert all(verdict.passed is None and "weights are quantised" in verdict.note for verdict in ours)
    assert any(verdict.passed for verdict in report.verdicts if verdict.subject.startswith("eager"))


def test_weights_that_came_from_the_formats_lose_nothing(engine_of: Engines, tmp_path: Path) -> None:
    """The trained model at its values in bf16, quantised back: only wo_a changes, which it stores as bf16."""
    source = write_bf16(FOLDERS["tiny-v41"], tmp_path / "tiny-bf16")
    engine = engine_of(source, "release", "+quantize")
    changed = {weight.kind for weight in inspect(engine).quantization if weight.snr_db is not None}
    assert changed == {"attn.wo_a"}
    report = compare(engine, checkpoint=source, prompt_tokens=48, decode_steps=4)
    (row,) = (row for row in report.quantized if (row.phase, row.subject) == ("prefill", "engine"))
    assert np.mean(row.kl_nats) < 0.1
    assert row.top1_agreement > 0.8
    tokens = np.arange(5, 60, dtype=np.int32)
    logits = [Session(load(each)).prefill(tokens) for each in (engine, engine_of(FOLDERS["tiny-v41"]))]
    assert np.linalg.norm(logits[0] - logits[1]) < 0.1 * np.linalg.norm(logits[1])
