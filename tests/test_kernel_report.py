"""`v41c inspect ENGINE --kernels` on an engine without machine code, and on engines that it is not for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.codegen.cuda.uncompiled import compile_uncompiled
from v41c.cli import cli
from v41c.errors import UsageError
from v41c.init import init
from v41c.kernel_report import kernel_report


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model for Hopper."""
    folder = tmp_path_factory.mktemp("kernels")
    init(folder / "model", "tiny", 5)
    compile_uncompiled(folder / "model", folder / "engine")
    return folder / "engine"


def test_a_reuse_layer_takes_few_launches(engine: Path) -> None:
    """Eleven in decode and fifteen in prefill is what the deployed system of the model's authors reports.

    Of the reuse layers, that with the fewest: others have an Engram in front or are read by the draft head.
    """
    report = kernel_report(engine)
    assert [step.tokens for step in report.steps] == [1, 16]
    reuse = [name for name, mode in report.modes.items() if mode == "reuse"]
    assert reuse
    for step, most in zip(report.steps, (11, 15), strict=True):
        assert 0 < min(step.layer_launches[name] for name in reuse) <= most
        assert step.launches >= sum(row.calls for row in step.kernels)


def test_json_and_text_say_the_same(engine: Path) -> None:
    found = CliRunner().invoke(cli, ["inspect", str(engine), "--kernels", "--graph", "decoder:1", "--json"])
    assert found.exit_code == 0, found.output
    (step,) = json.loads(found.output)["steps"]
    assert step["graphs"] == ["decoder:1"]
    text = CliRunner().invoke(cli, ["inspect", str(engine), "--kernels", "--graph", "decoder:1"]).output
    assert f"{step['launches']} launches" in text
    assert "mhc_boundary" in text
    assert "bounds of time are of the H200 SXM" in text


def test_refusals(engine: Path) -> None:
    def refused(*arguments: str) -> str:
        result = CliRunner().invoke(cli, ["inspect", str(engine), "--kernels", *arguments])
        assert result.exit_code == 2
        return result.output

    with pytest.raises(UsageError, match=r"graph: expected one of encoder:1, encoder:16, decoder:1, .*, got 'no'"):
        kernel_report(engine, "no")
    assert "expected --kernels without --layer" in refused("--layer", "3")
    assert "got several" in refused("--html", "page.html")
