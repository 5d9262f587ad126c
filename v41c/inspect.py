"""The driver of `v41c inspect`: what is in an engine, from its folder alone."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from v41c.errors import UsageError
from v41c.inspect_text import inspect_text
from v41c.ir.op import Cost
from v41c.layers import Layer, layer_of, layer_plan
from v41c.manifest import Command, Manifest, PassEntry, Program, StateEntry, capacities
from v41c.memory import peak_bytes
from v41c.operations import (
    LayerCosts,
    Operation,
    check_layer,
    costs_by_place,
    layer_costs,
    operations,
    stage_cost,
    step_dims,
    wanted_graph,
)
from v41c.quantization import QuantizedWeight, read_quantization
from v41c.runtime.artifact import Engine, load
from v41c.runtime.bounds import extent_bytes
from v41c.runtime.states import bytes_per_token
from v41c.stage_diff import StageDiff, stage_diff
from v41c.stages import Stages, chosen_graphs, engine_stages, stage_file

_ORIGIN = re.compile(r" // (\S*) \| \S")


@dataclass(frozen=True)
class ProgramSummary:
    """A program: steps of up to `max_tokens` tokens of a graph; `operations` counts its commands by operation."""

    graph: str
    max_tokens: int
    commands: int
    kernels: int
    values: int
    arena_bytes: int
    operations: dict[str, int]


@dataclass(frozen=True)
class StateSummary:
    """A state: bytes per sequence slot at the full context, and by how much it grows with each token."""

    name: str
    dtype: str
    shape: list[int | str]
    slot_bytes: int
    bytes_per_token: float


class PassRow(PassEntry, frozen=True, kw_only=True):
    """A ledger row and the bytes of activations that the largest step of a prompt needs after the pass."""

    peak_bytes: int


@dataclass(frozen=True)
class StepCosts:
    """What a part of the engine costs for one token and for the largest step of a prompt, at the full context."""

    decode: Cost
    chunk: Cost


@dataclass(frozen=True)
class InspectReport:
    """Everything the manifest and the graphs say, summed up.

    `passes` is the ledger: costs of one decoded token after each pass. `layers` has what the layers cost, `outside` the
    rest of each graph. `operations` lists those of one layer, when one is asked for. `quantization` has the weights
    that the pass `quantize` made, and how near they stayed.
    """

    engine: str
    graph: str | None
    layer: str | None
    v41c_version: str
    format_version: int
    target: str
    cpu_features: list[str]
    arithmetic: str
    config: dict[str, object]
    max_context: int
    slots: int
    has_weights: bool
    weight_bytes: int
    weights: int
    kernels: int
    folder_bytes: int
    state_bytes_per_token: float
    state_slot_bytes: int
    prefill_ced: str
    passes: list[PassRow]
    layers: list[LayerCosts]
    outside: dict[str, StepCosts]
    programs: list[ProgramSummary]
    states: list[StateSummary]
    operations: list[Operation]
    quantization: list[QuantizedWeight]

    def to_json(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain | {"layers": [layer.to_json() for layer in self.layers]}

    def summary(self) -> str:
        """The same for people."""
        return inspect_text(self)


def inspect(engine: str | Path, graph: str | None = None, layer: str | None = None) -> InspectReport:
    """What an engine holds; of one graph (`decoder`, `decoder:512`) or layer (`3`, `mtp.0`) when it is named.

    ArtifactError for a folder that is no engine, UsageError for a graph or layer that it does not have.
    """
    loaded = load(engine)
    return engine_report(loaded, engine_stages(loaded), str(engine), graph, layer)


def engine_report(
    engine: Engine, stages: Stages, name: str, graph: str | None = None, layer: str | None = None
) -> InspectReport:
    """`inspect` of a loaded engine whose stages are at hand."""
    manifest = engine.manifest
    plan = layer_plan(stages.halves)
    layer = None if layer is None else check_layer(plan, layer)
    programs = _programs(manifest, graph)
    bare = None if graph is None else _bare(graph)
    commands = [command for program in programs for command in _commands(program, layer)]
    used = _states_of(manifest, commands)
    states = [_state(state, manifest) for state in manifest.states if state.name in used]
    return InspectReport(
        engine=name,
        graph=graph,
        layer=layer,
        v41c_version=manifest.v41c_version,
        format_version=manifest.format_version,
        target=manifest.target,
        cpu_features=manifest.cpu_features,
        arithmetic=manifest.arithmetic,
        config=manifest.config,
        max_context=manifest.max_context,
        slots=manifest.slots,
        has_weights=manifest.has_weights,
        weight_bytes=sum(weight.size_bytes for weight in manifest.weights),
        weights=len(manifest.weights),
        kernels=len({command.kernel for command in commands}),
        folder_bytes=sum(entry.size_bytes for entry in manifest.files.values()),
        state_bytes_per_token=bytes_per_token(manifest),
        state_slot_bytes=sum(state.slot_bytes for state in states),
        prefill_ced=_ced(manifest),
        passes=list(_passes(manifest, stages, bare, layer)),
        layers=[costs for costs in layer_costs(stages.last, plan) if _wanted(costs.plan, bare, layer)],
        outside={} if layer is not None else _outside(stages, bare),
        programs=[_program(program, layer) for program in programs if layer is None or _commands(program, layer)],
        states=states,
        operations=[] if layer is None else list(_operations(stages, graph, layer)),
        quantization=[weight for weight in read_quantization(engine) if layer in (None, layer_of(weight.name))],
    )


def _passes(manifest: Manifest, stages: Stages, graph: str | None, layer: str | None) -> Iterator[PassRow]:
    """The ledger of the backbone, or of a graph or layer from the pass on that made it."""
    token, chunk = (step_dims(stages.last, tokens) for tokens in ("fewest", "most"))
    for entry in manifest.passes:
        found = stage_cost(stages[entry.name], token, graph, layer)
        if found is None:
            continue
        count, cost = found
        yield PassRow(
            name=entry.name,
            operations=count,
            launches=cost.launches,
            flops=cost.flops,
            weight_bytes=cost.weight_bytes,
            state_bytes=cost.state_bytes,
            activation_bytes=cost.activation_bytes,
            seconds=entry.seconds,
            peak_bytes=peak_bytes(stages, entry.name, chunk),
        )


def _wanted(plan: Layer, graph: str | None, layer: str | None) -> bool:
    return layer in (None, plan.name) and graph in (None, plan.part)


def _outside(stages: Stages, graph: str | None) -> dict[str, StepCosts]:
    decode, chunk = (costs_by_place(stages.last, tokens) for tokens in ("fewest", "most"))
    names = {layer_of(place) for place in decode}
    return {
        place: StepCosts(decode[place], chunk[place])
        for place in decode
        if place not in names and graph in (None, place)
    }


def _operations(stages: Stages, graph: str | None, layer: str) -> Iterator[Operation]:
    """Operations of a layer: for one token, unless a graph is named for another number of tokens."""
    graphs = stages.last if graph is not None and ":" in graph else chosen_graphs(stages.last, "fewest").values()
    for one in graphs:
        if wanted_graph(one, graph):
            yield from (operation for operation in operations(one, stages.unfused) if operation.layer == layer)


def difference(
    engine: str | Path, before: str, after: str, graph: str | None = None, layer: str | None = None
) -> StageDiff:
    """What changed from one stage to another, "trace" being the one before the first pass.

    UsageError names the passes, graphs or layers there are.
    """
    stages = engine_stages(load(engine))
    layer = None if layer is None else check_layer(layer_plan(stages.halves), layer)
    return stage_diff((before, stages[before]), (after, stages[after]), graph, layer)


def graph_text(engine: str | Path, after: str, graph: str | None = None, layer: str | None = None) -> str:
    """Text of the graphs as they stood after a pass ("trace": before the first), or of one of them.

    With `layer`, only its operations. UsageError names the passes, graphs or layers there are. A graph that is compiled
    for several numbers of tokens appears once for each, as `NAME:TOKENS`; `NAME` means all of them.
    """
    loaded = load(engine)
    text = (loaded.path / stage_file(loaded, after)).read_text(encoding="utf-8")
    if layer is not None:
        layer = check_layer(layer_plan(engine_stages(loaded).halves), layer)
    elif graph is None:
        return text
    found = {block.split(maxsplit=2)[1]: block for block in _blocks(text)}
    chosen = [block for name, block in found.items() if graph in (None, name, _bare(name))]
    if not chosen:
        raise UsageError(f"graph: expected one of {', '.join(found)} after {after}, got {graph!r}")
    return "\n".join(chosen if layer is None else _of_layer(chosen, layer))


def _of_layer(blocks: list[str], layer: str) -> Iterator[str]:
    """Graphs with nothing but the operations of a layer; those without any are left out."""
    for block in blocks:
        first, *lines = block.strip().splitlines()
        kept = [line for line in lines if (found := _ORIGIN.search(line)) and layer_of(found[1]) == layer]
        if kept:
            yield "\n".join([first, *kept, "}\n"])


def _blocks(text: str) -> list[str]:
    """Every graph's text."""
    return [block + "\n}\n" for block in text.split("\n}\n") if block.strip()]


def _bare(graph: str) -> str:
    """Name of a graph without its number of tokens."""
    return graph.partition(":")[0]


def _programs(manifest: Manifest, graph: str | None) -> list[Program]:
    found = [
        program
        for program in manifest.programs
        if graph in (None, program.graph, f"{program.graph}:{program.max_tokens}")
    ]
    if not found:
        names = dict.fromkeys(program.graph for program in manifest.programs)
        raise UsageError(f"graph: expected one of {', '.join(names)}, got {graph!r}")
    return found


def _commands(program: Program, layer: str | None) -> list[Command]:
    return [command for command in program.commands if layer in (None, layer_of(command.origin))]


def _states_of(manifest: Manifest, commands: list[Command]) -> set[str]:
    return {
        manifest.states[argument.index].name
        for command in commands
        for argument in command.arguments
        if argument.kind == "state"
    }


def _program(program: Program, layer: str | None) -> ProgramSummary:
    commands = _commands(program, layer)
    return ProgramSummary(
        graph=program.graph,
        max_tokens=program.max_tokens,
        commands=len(commands),
        kernels=len({command.kernel for command in commands}),
        values=len(program.values),
        arena_bytes=program.arena_bytes,
        operations=dict(sorted(Counter(command.op for command in commands).items())),
    )


def _state(state: StateEntry, manifest: Manifest) -> StateSummary:
    dims = {"S": 1, **capacities(manifest.dims, manifest.max_context)}
    ratios = [int(dim[1:]) for dim in state.shape if isinstance(dim, str) and dim in dims and dim != "S"]
    one_row = extent_bytes(state, dims | {dim: 1 for dim in dims})
    return StateSummary(
        state.name, state.dtype, state.shape, extent_bytes(state, dims), one_row / ratios[0] if ratios else 0.0
    )


def _ced(manifest: Manifest) -> str:
    return "ced or full" if manifest.causal_encoder_decoder else f"full only: {manifest.why_not_ced}"
