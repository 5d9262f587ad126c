"""Start here: a small random model goes all the way from a checkpoint to text, by the commands a person types."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from v41c.cli import main


def test_init_compile_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint, engine = str(tmp_path / "checkpoint"), str(tmp_path / "engine")

    # a random model of 8 layers with every feature of the architecture, in the release's file format
    assert main(["init", checkpoint, "--preset", "tiny", "--seed", "1"]) == 0

    # trace it, rewrite its graph, build kernels for this processor, pack the weights
    assert main(["compile", checkpoint, "-o", engine, "--max-context", "128"]) == 0
    assert "plan-memory" in capsys.readouterr().out

    # continue a text; the weights are random, so the text makes no sense, but it is always the same
    command = ["run", engine, "--prompt", "In the beginning", "--max-new-tokens", "8", "--json"]
    assert main(command) == 0
    first = json.loads(capsys.readouterr().out)
    assert len(first["tokens"]) == 8
    assert first["finish_reason"] == "max new tokens"
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out)["text"] == first["text"]
