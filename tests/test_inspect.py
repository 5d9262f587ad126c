"""`v41c inspect`: the pipeline as a table, layers, graphs after a pass and differences, from the folder alone."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from v41c.errors import UsageError
from v41c.frontend.presets import TRAINED_CHECKPOINT
from v41c.inspect import InspectReport, difference, engine_report, graph_text, inspect
from v41c.ir.build import Builder
from v41c.ir.graph import Graph, Module
from v41c.ir.ops.add import Add
from v41c.ir.ops.rms_norm import RmsNorm
from v41c.ir.text import parse_module
from v41c.ir.types import DType, TensorType
from v41c.memory import memory_plan, peak_bytes
from v41c.operations import operations
from v41c.passes import plan_memory
from v41c.passes.pipeline import pass_names
from v41c.runtime.artifact import load
from v41c.stage_diff import stage_diff
from v41c.stages import Stages, chosen_graphs, engine_stages, is_backbone

ROOT = Path(__file__).parents[1]
EngineOf = Callable[[Path, str], Path]


@pytest.fixture(scope="module")
def engine(engine_of: EngineOf) -> Path:
    """The shipped model, compiled."""
    return engine_of(TRAINED_CHECKPOINT, "release")


@pytest.fixture(scope="module")
def report(engine: Path) -> InspectReport:
    """All there is to say about it."""
    return inspect(engine)


def test_the_table_is_the_recorded_ledger(engine: Path, report: InspectReport) -> None:
    recorded = load(engine).manifest.passes
    fields = ("name", "operations", "launches", "flops", "weight_bytes", "state_bytes", "activation_bytes")
    assert [[getattr(row, field) for field in fields] for row in report.passes] == [
        [getattr(entry, field) for field in fields] for entry in recorded
    ]


def test_peak_memory_is_the_largest_arena_of_a_chunk(engine: Path, report: InspectReport) -> None:
    programs = load(engine).manifest.programs
    arenas = [p.arena_bytes for p in programs if p.max_tokens == 512 and not p.graph.startswith("draft")]
    assert report.passes[-1].peak_bytes == max(arenas)
    assert all(row.peak_bytes > 0 for row in report.passes)


def test_an_engine_without_memory_planning_states_what_it_takes(engine: Path, report: InspectReport) -> None:
    stages = engine_stages(load(engine))
    unplanned = stages["select-kernels"]
    without = Stages({"trace": lambda: stages["trace"], "select-kernels": lambda: unplanned})
    apart = [graph for graph in plan_memory.place_apart(unplanned) if is_backbone(graph)]
    peak = peak_bytes(without, "select-kernels", {})
    assert peak == max(plan_memory.arena_bytes(graph) for graph in apart)
    assert peak > 2 * report.passes[-1].peak_bytes


def test_time_is_shown_only_where_it_is_recorded(report: InspectReport) -> None:
    assert all(row.seconds is None for row in report.passes)
    header = next(line for line in report.summary().splitlines() if line.startswith("after "))
    assert header.split() == [
        *("after", "operations", "launches", "arithmetic", "weights", "states", "activations", "peak", "memory")
    ]


def test_layers_follow_the_plan(report: InspectReport) -> None:
    modes = {entry.plan.name: entry.plan.mode for entry in report.layers}
    assert [modes[f"layers.{n}"] for n in range(12)] == [
        *("window", "window", "full", "reuse", "full", "reuse"),
        *("full", "reuse", "reindex", "reuse", "reindex", "reuse"),
    ]
    layers = {entry.plan.name: entry.plan for entry in report.layers}
    assert {name for name, plan in layers.items() if plan.part == "decoder"} == {f"layers.{n}" for n in range(6, 12)}
    assert {name for name, plan in layers.items() if plan.part == "draft"} == {"mtp.0", "mtp.1"}
    assert {name for name, plan in layers.items() if plan.engram} == {"layers.1", "layers.4"}
    assert {name for name, plan in layers.items() if plan.draft_target} == {f"layers.{n}" for n in (9, 10, 11)}
    assert (layers["layers.5"].kv_source, layers["layers.5"].index_source) == ("layers.4", "layers.4")
    assert (layers["layers.11"].kv_source, layers["layers.11"].index_source) == ("layers.6", "layers.10")
    assert [name for name, plan in layers.items() if plan.candidate_source] == ["layers.8", "layers.10"]
    assert (layers["layers.2"].ratio, layers["layers.6"].ratio, layers["layers.0"].ratio) == (2, 1, 0)


def test_layers_and_the_rest_add_up_to_the_ledger(report: InspectReport) -> None:
    parts = [entry.decode for entry in report.layers if entry.plan.part != "draft"]
    parts += [costs.decode for name, costs in report.outside.items() if not name.startswith("draft")]
    last = report.passes[-1]
    for field in ("launches", "flops", "weight_bytes", "state_bytes", "activation_bytes"):
        assert sum(getattr(cost, field) for cost in parts) == getattr(last, field), field


def test_a_layer_s_operations_add_up_to_its_costs(engine: Path, report: InspectReport) -> None:
    for name in ("layers.2", "layers.8", "mtp.0"):
        narrowed = inspect(engine, layer=name.removeprefix("layers."))
        (entry,) = narrowed.layers
        assert entry.plan.name == name
        assert {operation.layer for operation in narrowed.operations} == {name}
        assert sum(operation.cost.flops for operation in narrowed.operations) == entry.decode.flops
        assert sum(operation.cost.launches for operation in narrowed.operations) == entry.launches
        assert sum(entry.made_by.values()) == entry.launches
        if entry.plan.part != "draft":
            assert narrowed.passes[-1].flops == entry.decode.flops
        assert all(state.name.startswith((name, entry.plan.kv_source or name)) for state in narrowed.states)


def test_a_fused_operation_says_what_it_stands_for(engine: Path) -> None:
    (first, *_) = [o for o in inspect(engine, layer="7").operations if o.op == "mhc_boundary"]
    assert first.made_by == "fuse-mhc"
    assert set(first.parts) == {"hc_update", "hc_coefficients", "hc_mix", "rms_norm", "round_trip"}
    assert first.roles.count("weight") == 4
    stages = engine_stages(load(engine))
    every = [
        one for graph in chosen_graphs(stages.last, "fewest").values() for one in operations(graph, stages.unfused)
    ]
    assert all(operation.parts == [] for operation in every if operation.made_by == "trace")
    # nothing is lost and nothing counted twice: single operations and parts are the unfused graphs, but for the sorting
    # of each Engram's rows, which no operation of the model does
    count = sum(len(graph.nodes) for graph in stages.unfused)
    added = [operation for operation in every if operation.op == "sort_rows"]
    assert [operation.made_by for operation in added] == ["reorder-sparse-gathers"] * 2
    assert sum(len(operation.parts) or 1 for operation in every) == count + len(added)


def test_a_graph_of_a_chunk_narrows_to_its_operations(engine: Path) -> None:
    narrowed = inspect(engine, "decoder:512", "8")
    (program,) = narrowed.programs
    assert (program.graph, program.max_tokens) == ("decoder", 512)
    assert {operation.graph for operation in narrowed.operations} == {"decoder:512"}
    assert sum(not operation.view for operation in narrowed.operations) == program.commands
    (entry,) = narrowed.layers
    assert sum(operation.cost.flops for operation in narrowed.operations) == entry.chunk.flops
    # the graph came to be when the model was cut
    assert narrowed.passes[0].name == "split-encoder-decoder"


def test_the_text_of_a_layer_after_a_pass(engine: Path) -> None:
    text = graph_text(engine, "split-encoder-decoder", layer="7")
    lines = text.splitlines()
    assert lines[0] == "graph decoder {"
    assert lines[-1] == "}"
    assert all("// layers.7" in line for line in lines[1:-1])
    nodes = engine_stages(load(engine))["split-encoder-decoder"]["decoder"].nodes
    assert len(lines) - 2 == sum(node.origin.module.split(".")[:2] == ["layers", "7"] for node in nodes)


def stage_before(name: str) -> str:
    """The pass before another one."""
    names = ("trace", *pass_names())
    return names[names.index(name) - 1]


def test_a_difference_shows_the_fused_boundaries(engine: Path) -> None:
    diff = difference(engine, stage_before("fuse-mhc"), "fuse-mhc", layer="7")
    (graph,) = diff.graphs
    assert graph.operations["hc_update"] == (2, 0)
    assert graph.operations["mhc_boundary"] == (0, 2)
    assert graph.nodes[0] - graph.nodes[1] == graph.launches[0] - graph.launches[1] > 0
    added = [line for line in graph.lines if line.startswith("+")]
    assert len(added) == 2
    assert all("= mhc_boundary(" in line for line in added)
    text = diff.summary()
    assert text.startswith(f"--- {stage_before('fuse-mhc')}\n+++ fuse-mhc\n")
    assert "hc_update 2 → 0" in text


def test_the_model_is_compared_with_the_graphs_it_was_cut_into(engine: Path) -> None:
    diff = difference(engine, "trace", "split-encoder-decoder")
    cut = diff.graphs[0]
    assert (cut.before, cut.after) == (["model"], ["encoder", "decoder"])
    # the compressor's operations moved and a few were repeated: most lines are as before
    assert 0 < sum(line.startswith("+") for line in cut.lines) < 40
    assert not any(graph.changed for graph in diff.graphs[1:])


def test_kernels_and_places_are_no_changed_operations(engine: Path) -> None:
    chosen = difference(engine, stage_before("select-kernels"), "select-kernels")
    assert not any(graph.changed for graph in chosen.graphs)
    assert chosen.graphs[0].after == ["encoder:1", "encoder:512"]
    assert "kernels chosen for" in chosen.summary()
    placed = difference(engine, "select-kernels", "plan-memory", graph="decoder")
    (decoder,) = placed.graphs
    assert decoder.placed[0] == 0 < decoder.placed[1]
    assert "results placed in the arena; every operation as before" in placed.summary()


def small(name: str, *, norms: int, module: str = "layers.0") -> Graph:
    """A graph of some norms in a row and an addition."""
    builder = Builder(name)
    x = builder.input("x", TensorType(DType.BF16, ("T", 8)))
    weight = builder.weight(f"{module}.norm.weight", TensorType(DType.BF16, (8,)))
    value = x
    for index in range(norms):
        (value,) = builder.apply(RmsNorm(1e-6), value, weight, names=(f"{module}.norm.{index}",), module=module)
    (out,) = builder.apply(Add("bf16"), value, x, names=("out",))
    return builder.finish(out)


def test_a_small_difference_reads_as_one() -> None:
    before, after = (Module((small("model", norms=norms),)) for norms in (1, 2))
    assert stage_diff(("a", before), ("b", after)).summary().splitlines() == [
        "--- a",
        "+++ b",
        "",
        "graph model; operations 2 → 3, launches 2 → 3",
        "  rms_norm 1 → 2",
        "@@ outside the layers, layers.0 @@",
        "  .norm.0 : bf16[T,8] = rms_norm(x, .norm.weight) {eps=1e-06}",
        '- out : bf16[T,8] = add(.norm.0, x) {out="bf16"}'.replace(".norm.0", "layers.0.norm.0"),
        "+ .norm.1 : bf16[T,8] = rms_norm(.norm.0, .norm.weight) {eps=1e-06}",
        '+ out : bf16[T,8] = add(layers.0.norm.1, x) {out="bf16"}',
    ]


@pytest.mark.parametrize("graph", ["encoder:512", "decoder:512", "decoder:1", "draft:1"])
def test_the_memory_plan_has_a_place_for_every_value_and_no_two_in_one(engine: Path, graph: str) -> None:
    stages = engine_stages(load(engine))
    planned = stages.last[graph]
    memory = memory_plan(planned, stages.plans_memory)
    plan, live = memory.places, memory.live_bytes
    stored = [value for value in plan_memory.stored_values(planned)]
    views = sum(node.op.view for node in planned.nodes)
    assert len([place for place in plan if place.kind != "workspace"]) == len(stored) - views
    ends = max(place.offset + place.size_bytes for place in plan)
    assert memory.arena_bytes == plan_memory.arena_bytes(planned)
    assert ends <= memory.arena_bytes < ends + 64
    for index, place in enumerate(plan):
        for other in plan[:index]:
            together = place.begin <= other.end and other.begin <= place.end
            overlap = place.offset < other.offset + other.size_bytes and other.offset < place.offset + place.size_bytes
            assert not (together and overlap), (place, other)
    assert len(live) == len(planned.nodes)
    assert 0 < max(live) <= ends
    for operand in (value for node in planned.nodes[-1:] for value in node.operands if value is not None):
        assert any(place.value == operand.name and place.end >= len(planned.nodes) - 1 for place in plan) or (
            operand in planned.weights or operand in planned.state_versions
        )


def test_one_variant_of_each_graph_is_chosen(engine: Path) -> None:
    module = engine_stages(load(engine)).last
    assert [graph.name for graph in chosen_graphs(module, "fewest").values()] == [
        *("encoder:1", "decoder:1", "draft_context:1", "draft:1")
    ]
    most = chosen_graphs(module, "most")
    assert {name: is_backbone(graph) for name, graph in most.items()} == {
        "encoder": True,
        "decoder": True,
        "draft_context": False,
        "draft": False,
    }
    assert most["decoder"].name == "decoder:512"


def test_json_and_text_say_the_same(engine: Path) -> None:
    report = inspect(engine, layer="2")
    made = json.loads(json.dumps(report.to_json()))
    assert made["layers"][0]["mode"] == "full"
    assert made["layers"][0]["decode"]["flops"] == report.layers[0].decode.flops
    assert made["operations"][0]["op"] in report.summary()
    assert made["passes"][-1]["peak_bytes"] == report.passes[-1].peak_bytes


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda e: inspect(e, layer="12"), r"layer: expected 0 to 11 or mtp.0 or mtp.1, got '12'"),
        (lambda e: inspect(e, layer="mtp"), "layer: expected 0 to 11"),
        (lambda e: inspect(e, "decoder:7"), "graph: expected one of encoder, decoder, draft_context, draft, got"),
        (lambda e: graph_text(e, "magic", layer="1"), "pass: expected one of trace, "),
        (lambda e: difference(e, "trace", "magic"), "pass: expected one of trace, "),
        (lambda e: difference(e, "trace", "fuse-mhc", graph="middle"), "graph: expected one of model, "),
        (lambda e: difference(e, "trace", "fuse-mhc", layer="99"), "layer: expected 0 to 11"),
    ],
)
def test_what_there_is_not(engine: Path, call: Callable[[Path], object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        call(engine)


@pytest.mark.parametrize(
    "arguments", [("--layer", "3"), ("--diff", "trace", "fuse-mhc", "--json"), ("--pass", "trace", "--layer", "0")]
)
def test_the_folder_alone_is_enough(engine: Path, arguments: tuple[str, ...]) -> None:
    code = (
        "import sys\nfrom v41c.cli import main\ncode = main(sys.argv[1:])\n"
        "assert not {'torch', 'tvm', 'triton', 'onnx'} & set(sys.modules), 'a compiler was imported'\nsys.exit(code)"
    )
    command = [sys.executable, "-c", code, "inspect", str(engine), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_graphs_of_a_stage_are_read_once(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def parse(text: str) -> Module:
        read.append(text)
        return parse_module(text)

    monkeypatch.setattr("v41c.stages.parse_module", parse)
    loaded = load(engine)
    stages = engine_stages(loaded)
    engine_report(loaded, stages, "e")
    engine_report(loaded, stages, "e", layer="3")
    assert len(read) == len(stages.names)
