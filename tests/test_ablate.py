"""bench --ablate: an engine without each pass, measured in turns, and judged by no more than what was measured."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.traced import FOLDERS
from v41c.ablate import AGAIN, FULL, NONE, AblateOptions, AblateReport, Ratio, Variant, ablate, subject_of, without
from v41c.ablate_text import judge, verdict_of
from v41c.cli import main
from v41c.codegen.cpu import build
from v41c.compile import CompileOptions, compile
from v41c.errors import UnsupportedError, UsageError
from v41c.frontend.config import parse_config
from v41c.frontend.initialize import write_weights
from v41c.passes import fuse_attention, fuse_moe, pipeline, plan_memory, remove_quantization, select_kernels

SHORT = AblateOptions(context=24, prefill_tokens=16, decode_steps=4, rounds=2)
#: enough passes to see each kind of effect; the others only take time
FEW = tuple(entry.NAME for entry in (remove_quantization, fuse_moe, fuse_attention, select_kernels, plan_memory))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of width 96, the second with a compressed cache; random weights."""
    folder = tmp_path_factory.mktemp("ablate") / "model"
    folder.mkdir()
    flat = json.loads((FOLDERS["case_02"] / "config.json").read_text())
    flat |= {"n_layers": 2, "compress_ratios": [0, 4], "kv_source_layers": [1], "index_source_layers": [1]}
    (folder / "config.json").write_text(json.dumps(flat))
    write_weights(folder, parse_config(flat, "two layers"), 0, lambda done, total: None)
    return folder


@pytest.fixture(scope="module")
def compiled() -> list[str]:
    """Symbols of the kernels that were compiled for the report."""
    return []


@pytest.fixture(scope="module")
def report(model: Path, compiled: list[str]) -> AblateReport:
    original = build.compile_object
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(model.parent / "cache"))
        patch.setattr(build, "compile_object", lambda k, t, p: (compiled.append(k.symbol), original(k, t, p)))
        patch.setattr(pipeline, "pass_names", lambda: FEW)
        file = model.parent / "drawing.svg"
        return ablate(model, options=SHORT, plot=file)


def test_engines_have_room_for_every_round() -> None:
    options = AblateOptions()
    assert options.bench.rounds == options.rounds
    assert options.bench.longest == options.context + (options.rounds + 1) * options.decode_steps


def test_every_optional_pass_is_left_out_once(report: AblateReport) -> None:
    assert [variant.name for variant in report.variants] == [
        FULL,
        AGAIN,
        fuse_moe.NAME,
        fuse_attention.NAME,
        plan_memory.NAME,
        NONE,
    ]
    for variant in report.variants[2:-1]:
        assert variant.passes == tuple(name for name in FEW if name != variant.name)
    assert report.variants[-1].passes == pipeline.REQUIRED
    assert [judgement.name for judgement in report.judgements] == [v.name for v in report.variants[2:]]


def test_what_a_pass_does_is_in_its_row(report: AblateReport) -> None:
    """What does not depend on time: launches, memory, and that every bit is the same."""
    full, again, moe, attention, memory, none = report.variants
    assert full.launches == again.launches == memory.launches < moe.launches < none.launches
    assert full.launches < attention.launches < none.launches
    assert moe.launches + attention.launches - full.launches == none.launches
    assert memory.arena_bytes > full.arena_bytes
    assert none.arena_bytes > memory.arena_bytes
    for variant in report.variants:
        assert variant.identical
        assert variant.relative_l2 == variant.kl_nats == 0
        assert variant.traffic == variant.arithmetic == 1
        for ratio in variant.ratios.values():
            assert ratio.low <= ratio.median <= ratio.high
    assert all(ratio == Ratio(1, 1, 1) for ratio in full.ratios.values())


def test_the_report_is_text_json_and_a_drawing(report: AblateReport, model: Path) -> None:
    text = report.summary()
    for name in (*FEW[1:3], "every optional pass", "same bits", "noise ±"):
        assert name in text
    assert json.loads(json.dumps(report.to_json()))["variants"][2]["name"] == fuse_moe.NAME
    drawing = (model.parent / "drawing.svg").read_text()
    assert drawing.lstrip().startswith("<?xml")
    assert "</svg>" in drawing


def test_kernels_are_compiled_once_for_all(report: AblateReport, compiled: list[str]) -> None:
    """The engines mostly have the same kernels, and no plan of memory is in them."""
    assert report.variants
    assert len(compiled) == len(set(compiled)) > 0


def test_an_engine_says_which_passes_it_has(model: Path) -> None:
    """Its own passes are left out, not those of today's default; its checkpoint must be given and be the right one."""
    engine = model.parent / "own"
    passes = (remove_quantization.NAME, select_kernels.NAME, plan_memory.NAME)
    compile(model, engine, CompileOptions(max_context=64, passes=",".join(passes), arithmetic="exact"))
    source, names, options = subject_of(engine, model, SHORT)
    assert (source, names, options.arithmetic) == (model, passes, "exact")
    assert (options.max_context or 0) >= SHORT.bench.longest
    with pytest.raises(UsageError, match="it was not made of the shipped checkpoint"):
        subject_of(engine, None, SHORT)


def variant(name: str, decode: Ratio, launches: int = 10) -> Variant:
    ratios = {"decode": decode, "prefill": Ratio(1, 1, 1)}
    return Variant(name, (), {"decode": 1.0, "prefill": 1.0}, ratios, 1, 1, launches, 100, True, 0, 0)


def test_a_difference_within_the_noise_is_none() -> None:
    """Its own rounds, or the same engine measured twice, set what a difference must be beyond."""
    quiet, restless = Ratio(1.001, 0.999, 1.003), Ratio(1.0, 0.9, 1.1)
    clear = Ratio(1.05, 1.04, 1.06)
    assert verdict_of(clear, quiet) == "pays"
    assert verdict_of(clear, restless) == "neither"
    assert verdict_of(Ratio(1.05, 0.99, 1.11), quiet) == "neither"
    assert verdict_of(clear, Ratio(1.06, 1.05, 1.07)) == "neither"
    assert verdict_of(Ratio(0.95, 0.94, 0.96), quiet) == "costs"
    assert verdict_of(Ratio(0.999, 0.998, 1.0), quiet) == "neither"


def test_a_pass_that_does_not_pay_says_what_it_is_for() -> None:
    quiet = Ratio(1, 0.999, 1.001)
    variants = [
        variant(FULL, Ratio(1, 1, 1)),
        variant(AGAIN, quiet),
        variant("restrict-candidates", quiet),
        variant("fuse-moe", quiet, launches=14),
        variant("fuse-mhc", Ratio(0.9, 0.89, 0.91)),
    ]
    found = judge(variants, {"restrict-candidates": 4096, "fuse-moe": None, "fuse-mhc": None}, SHORT)
    assert "from a context of about 4096 tokens on: try --context 4096" in found[0].text
    assert "what it gives is 10 launches a token instead of 14" in found[1].text
    assert "its file says: logits, activations and the routed sum never leave the operation that makes them" in (
        found[1].text
    )
    saving = replace(variants[2], arithmetic=1.25)
    (text,) = [each.text for each in judge([*variants[:2], saving], {"restrict-candidates": 0}, SHORT)]
    assert "what it gives is 20% of a decode step's arithmetic; its file says: " in text
    assert found[2].verdict == {"decode": "costs", "prefill": "neither"}
    assert "COSTS time in decode (0.900x without, noise ±0.010)" in found[2].text


def test_required_passes_stay() -> None:
    names = pipeline.pass_names()
    engines = without(names)
    assert engines[FULL] == names
    assert all(set(pipeline.REQUIRED) <= set(passes) for passes in engines.values())
    assert len(engines) == len(names) - len(pipeline.REQUIRED) + 2


def test_what_cannot_be_drawn_is_said_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is compiled: the checkpoint need not even exist."""
    assert main(["bench", "nowhere", "--ablate", "--plot", str(tmp_path / "x.gif")]) == 2
    assert "--plot: expected a file that ends in .png or .svg" in capsys.readouterr().err
    assert main(["bench", "nowhere", "--ablate", "--plot", str(tmp_path / "no" / "x.png")]) == 2
    assert "expected a folder, found none" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UnsupportedError, match=r"^--plot: expected matplotlib, found none: pip install matplotlib$"):
        ablate("nowhere", plot=tmp_path / "x.png")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ablate", "--against", "eager"], "expected --ablate without --against, --batch and --draft"),
        (["--context", "64"], "expected --context and --plot with --ablate only"),
        (["--plot", "x.png"], "expected --context and --plot with --ablate only"),
    ],
)
def test_options_that_do_not_go_together(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "nowhere", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_checkpoint_needs_no_other(model: Path) -> None:
    with pytest.raises(UsageError, match="--checkpoint: expected it with an engine"):
        ablate(model, model, SHORT)
