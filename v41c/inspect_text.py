"""The text of an inspection: the engine in a few lines, then tables of passes, layers, operations, programs, states."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from v41c.ledger import passes_table
from v41c.quantization import quantization_text
from v41c.terminal import bytes_text, flops_text, table

if TYPE_CHECKING:
    from v41c.inspect import InspectReport, StateSummary
    from v41c.ir.op import Cost
    from v41c.operations import LayerCosts


def inspect_text(report: InspectReport) -> str:
    """The report for people."""
    return "\n".join(_lines(report))


def _lines(report: InspectReport) -> Iterator[str]:
    yield from _head(report)
    narrowed = " and ".join(name for name in (report.graph, report.layer) if name)
    yield ""
    yield f"passes (one decoded token at full context{f', {narrowed}' if narrowed else ''})"
    yield passes_table(
        report.passes,
        {entry.name: entry.seconds for entry in report.passes if entry.seconds is not None},
        {entry.name: entry.peak_bytes for entry in report.passes},
    )
    if report.layers:
        yield ""
        yield "layers (one decoded token at full context)"
        yield _layers(report)
    if report.operations:
        yield ""
        yield f"operations of {report.layer}"
        yield _operations(report)
    if report.quantization:
        yield ""
        yield quantization_text(report.quantization)
    yield ""
    yield "programs"
    yield table(
        ("graph", "tokens", "commands", "kernels", "arena"),
        [
            (p.graph, f"≤ {p.max_tokens}", str(p.commands), str(p.kernels), bytes_text(p.arena_bytes))
            for p in report.programs
        ],
    )
    yield ""
    yield (
        f"states: {bytes_text(report.state_slot_bytes)} a sequence, "
        f"growing by {report.state_bytes_per_token:g} bytes a token"
    )
    yield table(
        ("state", "type", "a sequence", "a token"),
        [
            (s.name, f"{s.dtype}[{','.join(map(str, s.shape))}]", bytes_text(s.slot_bytes), _grows(s))
            for s in report.states
        ],
    )


def _head(report: InspectReport) -> Iterator[str]:
    weights = f"{report.weights} weights, {bytes_text(report.weight_bytes)}" if report.has_weights else "no weights"
    yield f"engine      {report.engine} ({bytes_text(report.folder_bytes)})"
    yield f"made by     v41c {report.v41c_version}, format {report.format_version}"
    yield f"target      {report.target}"
    yield f"model       {_model(report.config)}"
    yield f"arithmetic  {report.arithmetic}"
    yield f"contents    {weights}, {report.kernels} kernels"
    yield f"context     {report.max_context} tokens, {_plural(report.slots, 'sequence')}"
    yield f"prefill     {report.prefill_ced}"


def _layers(report: InspectReport) -> str:
    rows = [
        (entry.plan.name, entry.plan.part, entry.plan.mode, *_sources(entry), *_costs(entry.decode))
        for entry in report.layers
    ]
    rows += [(f"rest of {name}", name, *("",) * 4, *_costs(costs.decode)) for name, costs in report.outside.items()]
    header = ("layer", "graph", "mode", "rows of", "selection of", "also", *_COSTS)
    return table(header, rows)


_COSTS = ("launches", "arithmetic", "weights", "states", "activations")


def _costs(cost: Cost) -> tuple[str, ...]:
    sizes = (cost.weight_bytes, cost.state_bytes, cost.activation_bytes)
    return str(cost.launches), flops_text(cost.flops), *map(bytes_text, sizes)


def _sources(entry: LayerCosts) -> tuple[str, str, str]:
    """Whose rows and selection a layer uses, and what else it does."""
    plan = entry.plan
    also = (
        "Engram" if plan.engram else "",
        f"among candidates of {plan.candidate_source}" if plan.candidate_source else "",
        "seen by the draft" if plan.draft_target else "",
    )
    return (
        "" if plan.kv_source in (None, plan.name) else str(plan.kv_source),
        "" if plan.index_source in (None, plan.name) else str(plan.index_source),
        ", ".join(filter(None, also)),
    )


def _operations(report: InspectReport) -> str:
    """Modules and results without the name of the layer; of several results the last."""
    prefix = f"{report.layer}."
    rows = [
        (
            operation.op,
            operation.module.removeprefix(prefix),
            operation.results[-1].removeprefix(prefix),
            operation.made_by,
            *_costs(operation.cost),
        )
        for operation in report.operations
    ]
    return table(("operation", "module", "result", "made by", *_COSTS), rows)


def _grows(state: StateSummary) -> str:
    return f"{state.bytes_per_token:g} B" if state.bytes_per_token else "-"


def _model(config: dict[str, object]) -> str:
    return f"{config['n_layers']} layers of width {config['dim']}, vocabulary {config['vocab_size']}"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
