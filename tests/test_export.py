"""`v41c export`: what it writes, that ONNX Runtime runs it as the interpreter does, and every mistake in one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import onnx
import pytest
import torch

from tests.codegen.onnx_harness import Session, by_session
from tests.played import SHIPPED, distance, interpreted, play
from tests.traced import FOLDERS, traced
from v41c import __version__
from v41c.cli import main
from v41c.codegen.onnx.body import DOMAIN
from v41c.errors import UsageError
from v41c.export import export
from v41c.frontend.presets import TRAINED_CHECKPOINT
from v41c.ir.graph import Module
from v41c.manifest import MANIFEST_FILE, WEIGHTS_FILE, decode, encode


@pytest.fixture
def engine(engine_of: Callable[[Path, str], Path]) -> Path:
    """An engine of the shipped model."""
    return engine_of(TRAINED_CHECKPOINT, "release")


def names(values: Any) -> list[str]:
    """Names of inputs, outputs or nodes."""
    return [value.name for value in values]


def test_the_whole_model_runs_as_the_interpreter_does(engine: Path, tmp_path: Path) -> None:
    """In release arithmetic, where roundings amplify what differs: measured up to 4 % of the largest logit.

    That every operation is right on its own is shown elsewhere, and in exact arithmetic that the whole is.
    """
    report = export(engine, tmp_path / "model.onnx")
    assert (report.graph, report.after) == ("model", "remove-quantization")
    assert report.checkpoint == str(TRAINED_CHECKPOINT)
    assert report.size_bytes < 20e6
    onnx.checker.check_model(report.file, full_check=True)
    model = onnx.load(report.file)
    assert {node.domain for node in model.graph.node} == {DOMAIN}
    assert {"attention", "hc_coefficients", "moe_experts"} <= set(report.functions)
    _, module = traced(SHIPPED)
    alone = Module((module["model"],))
    run = by_session({"model": Session(tmp_path / "model.onnx")})
    with torch.inference_mode():
        pairs = zip(play(alone, run, (12, 1)), play(alone, interpreted, (12, 1)), strict=True)
        logits = [distance(found, wanted) for (name, found), (_, wanted) in pairs if name.endswith("logits")]
    assert len(logits) == 2
    assert max(logits) < 0.1


def test_states_go_in_and_out_and_dimensions_keep_their_names(engine: Path, tmp_path: Path) -> None:
    report = export(engine, tmp_path / "encoder.onnx", graph="encoder")
    assert report.graph == "encoder:512"
    assert report.after == "plan-memory"
    model = onnx.load(report.file)
    assert "state.layers.0.window" in names(model.graph.input)
    assert "state.layers.0.window:out" in names(model.graph.output)
    shapes = {
        value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in (*model.graph.input, *model.graph.output)
    }
    assert shapes["tokens"] == ["T"]
    assert shapes["state.layers.0.window:out"] == ["S", 32, 66]
    assert shapes["state.layers.2.compressed"][:2] == ["S", "C2"]
    weights = {weight.name: weight for weight in model.graph.initializer}
    assert weights["layers.0.attn.wq_a.weight"].data_type == onnx.TensorProto.FLOAT8E4M3FN
    assert weights["layers.0.attn.wq_a.scale"].data_type == onnx.TensorProto.FLOAT8E8M0
    assert weights["layers.0.ffn.experts.{}.w1.weight"].data_type == onnx.TensorProto.UINT8
    modules = {entry.value for node in model.graph.node for entry in node.metadata_props if entry.key == "module"}
    assert "layers.0.attn" in modules
    facts = {entry.key: entry.value for entry in model.metadata_props}
    assert facts.pop("v41c") == __version__
    assert facts == {"graph": "encoder:512", "pass": "plan-memory", "arithmetic": "release"}


def test_any_pass_can_be_asked_for_and_gives_the_same_bytes_again(
    engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / "a.onnx", tmp_path / "b.onnx"]
    for file in files:
        arguments = [
            "export",
            str(engine),
            "--onnx",
            str(file),
            "--graph",
            "decoder",
            "--after",
            "split-encoder-decoder",
        ]
        assert main([*arguments, "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert (report["graph"], report["after"]) == ("decoder", "split-encoder-decoder")
    assert files[0].read_bytes() == files[1].read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.onnx", "b.onnx"]
    assert main(["export", str(engine), "--onnx", str(files[0]), "--graph", "draft_context"]) == 0
    assert "written    " in capsys.readouterr().out


def test_weights_are_inputs_without_a_checkpoint_that_fits(engine: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(engine, bare)
    (bare / WEIGHTS_FILE).unlink()
    manifest = decode((bare / MANIFEST_FILE).read_bytes())
    files = {name: entry for name, entry in manifest.files.items() if name != WEIGHTS_FILE}
    weights = [msgspec.structs.replace(weight, offset=0, size_bytes=0) for weight in manifest.weights]
    without = msgspec.structs.replace(manifest, has_weights=False, files=files, weights=weights)
    (bare / MANIFEST_FILE).write_bytes(encode(without))
    file = tmp_path / "draft.onnx"
    report = export(bare, file, graph="draft")
    assert report.checkpoint is None
    assert "left as inputs: --checkpoint puts them in" in report.summary()
    model = onnx.load(file)
    assert "embed.weight" in names(model.graph.input)
    assert not model.graph.initializer
    assert export(bare, file, graph="draft", checkpoint=TRAINED_CHECKPOINT).checkpoint == str(TRAINED_CHECKPOINT)
    with pytest.raises(UsageError, match=r"case_02: expected the checkpoint of .*bare, found another configuration"):
        export(bare, file, graph="draft", checkpoint=FOLDERS["case_02"])


def test_mistakes_are_named(engine: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.onnx"
    with pytest.raises(UsageError, match=r"graph: expected one of .*decoder.*model.*, got 'encode'"):
        export(engine, file, graph="encode")
    with pytest.raises(UsageError, match=r"expected one of .*encoder.* after split-encoder-decoder, got 'model'"):
        export(engine, file, after="split-encoder-decoder")
    with pytest.raises(UsageError, match=r"pass: expected one of trace, .*, got 'fuse'"):
        export(engine, file, after="fuse")
    with pytest.raises(UsageError, match=r"case_02: expected the checkpoint of .*, found another configuration"):
        export(engine, file, checkpoint=FOLDERS["case_02"])
    with pytest.raises(UsageError, match=r"nowhere/model\.onnx: cannot be written: No such file or directory"):
        export(engine, tmp_path / "nowhere" / "model.onnx")
    assert not list(tmp_path.iterdir())
