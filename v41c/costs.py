"""What a piece of work costs, from the graphs in an engine's folder: arithmetic, and bytes of weights and states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from v41c.ir.graph import Graph, Module
from v41c.ir.text import parse_module
from v41c.manifest import capacities
from v41c.runtime import schedules
from v41c.runtime.artifact import Engine
from v41c.stages import is_backbone, variant


@dataclass(frozen=True)
class Cost:
    """Floating-point operations, and bytes of weights and states that are read or written, of one piece of work."""

    flops: int
    traffic_bytes: int


def engine_costs(engine: Engine, prefill_tokens: Sequence[int], context: int) -> dict[str, Cost]:
    """Costs of `decode` at a context, and of each `prefill_N` of an empty sequence in the engine's default schedule."""
    graphs = _backbone(last_stage(engine))
    replay = engine.manifest.window if schedules.find("ced").why_not(engine) is None else None
    found = {"decode": _cost(engine, graphs, {name: 1 for name in graphs}, context)}
    for count in prefill_tokens:
        tokens = {name: min(count, replay) if name == "decoder" and replay else count for name in graphs}
        # a token of an empty sequence sees half of what the last one sees
        found[f"prefill_{count}"] = _cost(engine, graphs, tokens, count // 2)
    return found


def last_stage(engine: Engine) -> Module:
    """The graphs as the last pass left them."""
    names = sorted(name for name in engine.manifest.files if name.startswith("graphs/"))
    return parse_module((engine.path / names[-1]).read_text(encoding="utf-8"))


def _backbone(module: Module) -> dict[str, Graph]:
    """One variant of every graph that a token goes through, by name."""
    found: dict[str, Graph] = {}
    for graph in module:
        if is_backbone(graph):
            found.setdefault(variant(graph)[0], graph)
    return found


def _cost(engine: Engine, graphs: Mapping[str, Graph], tokens: Mapping[str, int], context: int) -> Cost:
    dims = {"S": 1, "R": 1, **capacities(engine.manifest.dims, context)}
    costs = [graph.cost({**dims, "T": tokens[name]}) for name, graph in graphs.items()]
    return Cost(sum(cost.flops for cost in costs), sum(cost.weight_bytes + cost.state_bytes for cost in costs))
