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
from v41c.ledger import passes_table
from v41c.manifest import Manifest, PassEntry, Program, StateEntry, capacities
from v41c.runtime.artifact import Engine, load
from v41c.runtime.bounds import extent_bytes
from v41c.runtime.states import bytes_per_token
from v41c.terminal import bytes_text, table

_STAGE_FILE = re.compile(r"graphs/(\d+)_(.+)\.ir")


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


@dataclass(frozen=True)
class InspectReport:
    """Everything the manifest says, summed up. `passes` is the ledger: costs of one decoded token after each pass."""

    engine: str
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
    passes: list[PassEntry]
    programs: list[ProgramSummary]
    states: list[StateSummary]

    def to_json(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain

    def summary(self) -> str:
        """The same for people."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        weights = f"{self.weights} weights, {bytes_text(self.weight_bytes)}" if self.has_weights else "no weights"
        yield f"engine      {self.engine} ({bytes_text(self.folder_bytes)})"
        yield f"made by     v41c {self.v41c_version}, format {self.format_version}"
        yield f"target      {self.target}"
        yield f"model       {_model(self.config)}"
        yield f"arithmetic  {self.arithmetic}"
        yield f"contents    {weights}, {self.kernels} kernels"
        yield f"context     {self.max_context} tokens, {_plural(self.slots, 'sequence')}"
        yield f"prefill     {self.prefill_ced}"
        yield ""
        yield "passes (operations and costs of one decoded token at full context)"
        yield passes_table(self.passes)
        yield ""
        yield "programs"
        yield table(
            ("graph", "tokens", "commands", "kernels", "arena"),
            [
                (p.graph, f"≤ {p.max_tokens}", str(p.commands), str(p.kernels), bytes_text(p.arena_bytes))
                for p in self.programs
            ],
        )
        yield ""
        yield (
            f"states: {bytes_text(self.state_slot_bytes)} a sequence, "
            f"growing by {self.state_bytes_per_token:g} bytes a token"
        )
        yield table(
            ("state", "type", "a sequence", "a token"),
            [
                (s.name, f"{s.dtype}[{','.join(map(str, s.shape))}]", bytes_text(s.slot_bytes), _grows(s))
                for s in self.states
            ],
        )


def inspect(engine: str | Path, graph: str | None = None) -> InspectReport:
    """What an engine holds, of one graph when it is named. ArtifactError for a folder that is no engine."""
    loaded = load(engine)
    manifest = loaded.manifest
    programs = [_program(program) for program in _programs(manifest, graph)]
    used = _states_of(manifest, graph)
    states = [_state(state, manifest) for state in manifest.states if state.name in used]
    return InspectReport(
        engine=str(engine),
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
        kernels=len({command.kernel for program in manifest.programs for command in program.commands}),
        folder_bytes=sum(entry.size_bytes for entry in manifest.files.values()),
        state_bytes_per_token=bytes_per_token(manifest),
        state_slot_bytes=sum(state.slot_bytes for state in states),
        prefill_ced=_ced(manifest),
        passes=manifest.passes,
        programs=programs,
        states=states,
    )


def graph_text(engine: str | Path, after: str, graph: str | None = None) -> str:
    """Text of the graphs as they stood after a pass ("trace": before the first), or of one of them.

    UsageError names the passes or graphs there are. A graph that is compiled for several numbers of tokens appears
    once for each, as `NAME:TOKENS`; `NAME` means all of them.
    """
    loaded = load(engine)
    text = (loaded.path / _stage_file(loaded, after)).read_text(encoding="utf-8")
    if graph is None:
        return text
    found = {block.split(maxsplit=2)[1]: block for block in _blocks(text)}
    chosen = [block for name, block in found.items() if graph in (name, name.partition(":")[0])]
    if not chosen:
        raise UsageError(f"graph: expected one of {', '.join(found)} after {after}, got {graph!r}")
    return "\n".join(chosen)


def _blocks(text: str) -> list[str]:
    """Every graph's text."""
    return [block + "\n}\n" for block in text.split("\n}\n") if block.strip()]


def _stage_file(engine: Engine, after: str) -> str:
    stages = {found[2]: found[0] for name in engine.manifest.files if (found := _STAGE_FILE.fullmatch(name))}
    if after not in stages:
        raise UsageError(f"pass: expected one of {', '.join(stages)}, got {after!r}")
    return stages[after]


def _programs(manifest: Manifest, graph: str | None) -> list[Program]:
    found = [program for program in manifest.programs if graph in (None, program.graph)]
    if not found:
        names = dict.fromkeys(program.graph for program in manifest.programs)
        raise UsageError(f"graph: expected one of {', '.join(names)}, got {graph!r}")
    return found


def _states_of(manifest: Manifest, graph: str | None) -> set[str]:
    return {
        manifest.states[argument.index].name
        for program in _programs(manifest, graph)
        for command in program.commands
        for argument in command.arguments
        if argument.kind == "state"
    }


def _program(program: Program) -> ProgramSummary:
    operations = Counter(command.op for command in program.commands)
    return ProgramSummary(
        graph=program.graph,
        max_tokens=program.max_tokens,
        commands=len(program.commands),
        kernels=len({command.kernel for command in program.commands}),
        values=len(program.values),
        arena_bytes=program.arena_bytes,
        operations=dict(sorted(operations.items())),
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


def _grows(state: StateSummary) -> str:
    return f"{state.bytes_per_token:g} B" if state.bytes_per_token else "-"


def _model(config: dict[str, object]) -> str:
    return f"{config['n_layers']} layers of width {config['dim']}, vocabulary {config['vocab_size']}"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
