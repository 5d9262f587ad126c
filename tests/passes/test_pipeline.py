"""Choosing and running passes: spelling, order, verification, dumps."""

from __future__ import annotations

from pathlib import Path

import pytest

from v41c.errors import UsageError
from v41c.ir.build import Builder
from v41c.ir.graph import Module
from v41c.ir.ops.add import Add
from v41c.ir.text import parse_module, print_module
from v41c.ir.types import f32
from v41c.passes.context import PassContext
from v41c.passes.pipeline import OPT_IN, PIPELINE, REQUIRED, choose_passes, pass_names, run_pipeline, write_stage
from v41c.targets.target import Target, all_targets

CONTEXT = PassContext("release", lambda *_: pytest.fail("no kernel is selected here"), (1,))


def module() -> Module:
    builder = Builder("draft")
    x = builder.input("x", f32("T", 4))
    return Module((builder.finish(*builder.apply(Add("f32"), x, x)),))


def test_every_pass_says_before_after_why_and_where_it_stands() -> None:
    for entry, phrase in PIPELINE:
        text = entry.__doc__ or ""
        assert all(word in text for word in ("Before:", "After:", "Why:")), entry.NAME
        assert phrase
        assert entry.__name__.rsplit(".", 1)[1].replace("_", "-") == entry.NAME


def test_all_and_each_optional_pass_left_out() -> None:
    assert choose_passes("all") == pass_names()
    for name in set(pass_names()) - set(REQUIRED):
        assert choose_passes(f"-{name}") == tuple(other for other in pass_names() if other != name)


def test_a_pass_that_is_off_is_added() -> None:
    every = tuple(entry.NAME for entry, _ in PIPELINE)
    assert set(every) - set(pass_names()) == set(OPT_IN) == {"quantize", "pack-activations"}
    assert choose_passes("+quantize,+pack-activations") == choose_passes("all,+quantize,+pack-activations") == every
    assert choose_passes("-plan-memory,+quantize,+pack-activations") == every[:-1]
    assert set(every) - set(choose_passes("+quantize")) == {"pack-activations"}
    assert choose_passes("+fuse-mhc,-quantize") == pass_names()
    assert choose_passes("quantize," + ",".join(REQUIRED)) == ("quantize", *REQUIRED)


@pytest.mark.parametrize("target", all_targets(), ids=lambda target: target.name)
def test_tensor_cores_that_apply_scales_are_given_packed_rows(target: Target) -> None:
    more = set(choose_passes("all", target)) - set(pass_names())
    assert more == ({"pack-activations"} if target.name in ("cuda:sm_100", "cuda:sm_120") else set())
    assert choose_passes("-pack-activations", target) == pass_names()


def test_names_to_run_keep_the_pipeline_order() -> None:
    assert choose_passes(",".join(reversed(REQUIRED))) == tuple(n for n in pass_names() if n in REQUIRED)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "--passes: expected all, names to run, or changes .*, got none"),
        (" , ", "--passes: expected all, names to run, or changes .*, got none"),
        ("-polish", "--passes: unknown pass polish: expected one of"),
        ("plan-memory,-split-encoder-decoder", "got both"),
        ("-select-kernels", "--passes: select-kernels cannot be left out"),
        ("plan-memory", "cannot be left out"),
        ("+polish", "--passes: unknown pass polish: expected one of quantize, "),
        ("+-quantize", "--passes: unknown pass -quantize"),
        ("+quantize,select-kernels", "got both"),
        ("+quantize,-quantize", "--passes: quantize: expected it to be added or left out, got both"),
    ],
)
def test_a_wrong_choice_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        choose_passes(text)


def test_stages_are_named_verified_and_dumped(tmp_path: Path) -> None:
    stages = list(run_pipeline(module(), CONTEXT, ("remove-quantization", "split-encoder-decoder")))
    assert [stage.name for stage in stages] == ["trace", "remove-quantization", "split-encoder-decoder"]
    for number, stage in enumerate(stages):
        write_stage(tmp_path, number, stage)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "00_trace.ir",
        "01_remove-quantization.ir",
        "02_split-encoder-decoder.ir",
    ]
    text = (tmp_path / "02_split-encoder-decoder.ir").read_text()
    assert print_module(parse_module(text)) == text


def test_a_pass_that_does_not_apply_returns_its_input() -> None:
    given = module()
    stages = list(run_pipeline(given, CONTEXT, ("remove-quantization",)))
    assert stages[-1].module is given
