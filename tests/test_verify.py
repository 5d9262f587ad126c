"""compile --verify: passes that are right are exact, and one that is broken is named with the layer it broke."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.traced import FOLDERS, traced
from v41c.arena import overlaps
from v41c.cli import main
from v41c.compile import Source, read_source
from v41c.frontend.presets import RELEASE_CONFIG
from v41c.ir.graph import Graph, Module, Node, Value
from v41c.passes import (
    fuse_mhc,
    fuse_moe,
    merge_projections,
    plan_memory,
    remove_quantization,
    restrict_candidates,
    select_kernels,
    split_encoder_decoder,
)
from v41c.passes.context import Numbers, PassContext
from v41c.passes.pipeline import PIPELINE, pass_names, run_pipeline
from v41c.subject import Arithmetic
from v41c.targets.x86_64 import V3
from v41c.traces import kept_trace
from v41c.verify import PassVerdict, VerifyReport, verify_stages

CASE = "case_00"  # 8 layers: compression, candidates, Engrams and a draft head
#: a node, and the graph it stands in, to the node that takes its place
Edit = Callable[[Graph, Node], Node]


def verified(*passes: ModuleType, arithmetic: Arithmetic = "release", source: Source | None = None) -> VerifyReport:
    """The report on some passes, with kernels in name only; remove-quantization comes first in any case."""

    def kernel(op: Any, *_: object) -> SimpleNamespace:
        return SimpleNamespace(symbol=op.name(), workspace_bytes=100)

    given, module = traced(CASE) if source is None else (source, kept_trace(source))
    bounds = {"S": 2, "C1": 256, "C2": 128}
    images = {"T": 64, "R": 64}
    context = PassContext(arithmetic, kernel, (1, 64), bounds, machine=V3, images=images)  # type: ignore[arg-type]
    chosen = {remove_quantization.NAME, *(entry.NAME for entry in passes)}
    return verify_stages(list(run_pipeline(module, context, chosen)), given)


def verdict_on(report: VerifyReport, entry: ModuleType) -> PassVerdict:
    """What the report says about a pass; nothing else in it failed."""
    (found,) = (verdict for verdict in report.passes if verdict.name == entry.NAME)
    assert [verdict.name for verdict in report.failed] in ([], [entry.NAME])
    return found


def edit(patch: pytest.MonkeyPatch, entry: ModuleType, where: Callable[[Node], bool], change: Edit) -> None:
    """Let a pass do its work and then change the nodes of one place."""
    run = entry.run

    def edited(graph: Graph) -> Graph:
        nodes = [change(graph, node) if where(node) else node for node in graph.nodes]
        return graph.with_nodes(nodes)

    patch.setattr(entry, "run", lambda module, context: Module(tuple(map(edited, run(module, context).graphs))))


def producer(graph: Graph, value: Value | None) -> Node:
    """The node that makes a value."""
    assert value is not None
    return graph.producers[value]


def test_every_pass_is_exact() -> None:
    """The pipeline as it is, in the release's arithmetic; the first pass has nothing to do there."""
    report = verified(*(entry for entry, _ in PIPELINE if entry.NAME in pass_names()))
    assert [verdict.name for verdict in report.passes] == list(pass_names())
    assert [verdict.outcome for verdict in report.passes] == ["unchanged"] + ["exact"] * (len(pass_names()) - 1)
    assert not report.failed
    for verdict in report.passes[1:]:
        assert verdict.compared > 1000
        assert {each.kind for each in verdict.integers} >= {"selection", "pool", "experts", "engram_rows", "drafts"}
        assert verdict.logits is not None
        assert verdict.logits.top1_agreement == 1
    assert set(report.passes[-1].arena_bytes) >= {"encoder:1", "decoder:64", "draft:1", "draft:64"}
    assert "no two values that live together overlap" in report.summary()


def test_another_arithmetic_moves_numbers_and_may() -> None:
    report = verified(split_encoder_decoder, arithmetic="exact")
    verdict = verdict_on(report, remove_quantization)
    assert verdict.outcome == "moved"
    assert verdict.passed
    assert verdict.first_landmark is not None
    assert verdict.first_landmark.layer == "layers.0"
    # roundings to fp8 and bf16, amplified by depth: far from nothing and far from another model
    assert verdict.logits is not None
    assert 0.001 < verdict.logits.error.relative_l2 < 0.5
    assert verdict_on(report, split_encoder_decoder).outcome == "exact"
    assert "it may: exact arithmetic leaves out the roundings" in report.summary()


def test_a_lost_round_trip_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A boundary's quantised output forgotten: layer 3's projections read what came before the round trip."""

    def unrounded(graph: Graph, node: Node) -> Node:
        (boundary,) = {producer(graph, node.operands[0])}
        trip = boundary.results.index(node.operands[0])  # type: ignore[arg-type]
        return replace(node, operands=(boundary.results[trip - 1], *node.operands[1:]))

    edit(monkeypatch, fuse_mhc, lambda node: node.origin.module == "layers.3.attn.wq_a", unrounded)
    report = verified(fuse_mhc, fuse_moe)
    verdict = verdict_on(report, fuse_mhc)
    assert not verdict.passed
    assert verdict.first is not None
    assert verdict.first.name == "layers.3.attn.wq_a.linear"
    assert verdict.first.step.startswith("prefill")
    assert verdict.first_landmark is not None
    assert verdict.first_landmark.layer == "layers.3"
    # a pass is held against the stage before it, so that the fault is not blamed on those that follow
    assert report.passes[-1].outcome == "exact"
    assert "fuse-mhc: moved; it must be exact" in report.summary()


def test_swapped_projections_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shared expert's gate and up projection change places: their shapes are the same."""

    def swapped(graph: Graph, node: Node) -> Node:
        x, first, second, *others = node.operands
        scales = others[2:]
        return replace(node, operands=(x, second, first, *others[:2], scales[1], scales[0], *scales[2:]))

    edit(
        monkeypatch,
        merge_projections,
        lambda node: node.op.name() == "linear_group" and node.origin.module.startswith("layers.5.ffn"),
        swapped,
    )
    verdict = verdict_on(verified(merge_projections), merge_projections)
    assert not verdict.passed
    assert verdict.first is not None
    assert verdict.first.layer == "layers.5"
    assert verdict.first_landmark is not None
    assert verdict.first_landmark.name == "layers.5.ffn_out"


def test_an_off_by_one_in_candidates_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of one row too many: integers change before any float does."""
    edit(
        monkeypatch,
        restrict_candidates,
        lambda node: node.op.name() == "index_candidates",
        lambda _, node: replace(node, op=replace(node.op, block=node.op.attributes()["block"] + 1)),
    )
    verdict = verdict_on(verified(split_encoder_decoder, restrict_candidates), restrict_candidates)
    assert not verdict.passed
    assert verdict.first == verdict.first_landmark
    assert verdict.first is not None
    assert verdict.first.name == "layers.6.selection"
    changed = {each.kind: each.changed for each in verdict.integers}
    assert changed["selection"] > 0
    assert changed["engram_rows"] == 0


def test_a_state_that_no_later_value_shows_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last layer's ring gets keys before their round trip: nothing but the state tells it in the first step."""

    def unrounded(graph: Graph, node: Node) -> Node:
        state, keys, *rest = node.operands
        return replace(node, operands=(state, producer(graph, keys).operands[0], *rest))

    edit(
        monkeypatch,
        fuse_moe,
        lambda node: node.op.name() == "window_write" and node.origin.module == "layers.7.attn",
        unrounded,
    )
    verdict = verdict_on(verified(fuse_moe), fuse_moe)
    assert not verdict.passed
    assert verdict.first is not None
    assert (verdict.first.name, verdict.first.layer) == ("layers.7.window", "layers.7")


def test_a_wrong_clamp_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    edit(
        monkeypatch,
        fuse_moe,
        lambda node: node.op.name() == "moe_layer" and node.origin.module == "layers.2.ffn",
        lambda _, node: replace(node, op=replace(node.op, limit=0.1)),
    )
    verdict = verdict_on(verified(fuse_moe), fuse_moe)
    assert not verdict.passed
    assert verdict.first is not None
    assert verdict.first.name == "layers.2.ffn_out"


def test_lifetimes_one_too_short_are_found_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the places that overlap, and by the NaN that is read."""
    assign = plan_memory._assign

    def shortened(blocks: list[Any], share: bool) -> None:
        for block in blocks:
            block.end = max(block.begin, block.end - 1)
        assign(blocks, share)

    monkeypatch.setattr(plan_memory, "_assign", shortened)
    report = verified(split_encoder_decoder, select_kernels, plan_memory)
    verdict = verdict_on(report, plan_memory)
    assert not verdict.passed
    assert verdict.outcome == "moved"
    assert any("node" in text and " and " in text for text in verdict.overlaps)
    assert verdict.relative_l2 == float("inf")
    assert "OVERLAPS" in report.summary()


def test_overlapping_inputs_are_found() -> None:
    """Nothing is written between them, so that only the comparison of places can tell."""
    module = traced(CASE)[1]
    kernel = SimpleNamespace(symbol="k", workspace_bytes=0)
    bounds = {"S": 2, "C1": 256, "C2": 128}
    context = PassContext("release", lambda *_: kernel, (8,), bounds, images={"T": 8, "R": 8})
    planned = plan_memory.run(select_kernels.run(module, context), context)["model:8"]
    assert not list(overlaps(planned))
    tokens, positions, *others = planned.inputs
    moved = replace(planned, inputs=(tokens, replace(positions, offset=tokens.offset), *others))
    assert next(overlaps(moved)).startswith("graph model:8: inputs ")


def test_reassociation_has_its_tolerance(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass that says by how much it may move is within it, or is not."""
    edit(
        monkeypatch,
        fuse_mhc,
        lambda node: node.op.name() == "mhc_boundary",
        lambda _, node: replace(node, op=replace(node.op, norm_eps=1e-6)),
    )
    for most, outcome, passed in ((0.1, "within tolerance", True), (1e-12, "moved", False)):
        monkeypatch.setattr(fuse_mhc, "NUMBERS", Numbers("another epsilon", most), raising=False)
        report = verified(fuse_mhc, arithmetic="exact")
        verdict = verdict_on(report, fuse_mhc)
        assert (verdict.outcome, verdict.passed) == (outcome, passed)
        assert "another epsilon" in report.summary()


def test_a_configuration_alone_gets_random_weights() -> None:
    source = read_source(FOLDERS["case_02"] / "config.json", no_weights=True)
    report = verified(split_encoder_decoder, source=source)
    assert report.weights == "random"
    verdict = verdict_on(report, split_encoder_decoder)
    assert verdict.outcome == "exact"
    assert verdict.compared > 1000


def test_the_release_is_too_large(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["compile", str(RELEASE_CONFIG), "-o", str(tmp_path / "e"), "--no-weights", "--verify"]
    assert main(arguments) == 2
    assert "takes models of at most 1.0 GiB of weights, this one has 475.2 GiB" in capsys.readouterr().err


def test_a_broken_pass_gives_no_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    edit(
        monkeypatch,
        fuse_moe,
        lambda node: node.op.name() == "moe_layer" and node.origin.module == "layers.2.ffn",
        lambda _, node: replace(node, op=replace(node.op, limit=0.1)),
    )
    engine = tmp_path / "engine"
    passes = f"{remove_quantization.NAME},{fuse_moe.NAME},{select_kernels.NAME}"
    arguments = ["compile", str(FOLDERS[CASE]), "-o", str(engine), "--passes", passes, "--verify", "--json"]
    assert main([*arguments, "--max-context", "128"]) == 1
    out, err = capsys.readouterr()
    assert err.startswith("v41c: error: pass fuse-moe: expected numbers to move by nothing, got ")
    assert "shows first in layers.2.ffn_out in layers.2, prefill of" in err
    report = json.loads(out)
    assert report["passed"] is False
    assert report["passes"][1]["first"]["layer"] == "layers.2"
    assert not engine.exists()
