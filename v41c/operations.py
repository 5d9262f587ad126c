"""Operations of the compiled graphs and what they cost, one by one and layer by layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from v41c.errors import UsageError
from v41c.ir.graph import Graph, Module, Node
from v41c.ir.op import Cost
from v41c.ir.rewrite import closure
from v41c.layers import Layer, layer_of
from v41c.stages import chosen_graphs, is_backbone, variant

NOTHING = Cost()


@dataclass(frozen=True)
class Operation:
    """A node of a graph at the graph's own bounds.

    `module` is where it comes from in the eager model and `made_by` the pass that made it; a view has no kernel and
    costs nothing. `parts` are the operations of the unfused graph that a rewritten one stands for. `roles` says of each
    operand whether it is a weight, a state or an activation; `results` are written `name: type`.
    """

    graph: str
    index: int
    op: str
    module: str
    layer: str
    made_by: str
    parts: list[str]
    kernel: str | None
    view: bool
    attributes: str
    operands: list[str | None]
    roles: list[str]
    results: list[str]
    cost: Cost


@dataclass(frozen=True)
class LayerCosts:
    """A layer of the plan and its share of an engine: operations but views, and what they cost at the full context.

    `decode` is one token, `chunk` the largest step of a prompt. `made_by` counts the operations by the pass that made
    them; `weight_bytes` is what the layer's weights take before they are packed.
    """

    plan: Layer
    launches: int
    decode: Cost
    chunk: Cost
    made_by: dict[str, int]
    weight_bytes: int

    def to_json(self) -> dict[str, Any]:
        """The layer's plan and costs in one object."""
        costs = {name: value for name, value in asdict(self).items() if name != "plan"}
        return asdict(self.plan) | costs


def step_dims(module: Module, tokens: str) -> dict[str, int]:
    """Bounds of the backbone's graphs for the "fewest" tokens (decode) or the "most" (a chunk of a prompt)."""
    graphs = chosen_graphs(module, tokens).values()
    return {dim: bound for graph in graphs if is_backbone(graph) for dim, bound in graph.bounds.items()}


def operations(graph: Graph, unfused: Module) -> Iterator[Operation]:
    """Every node of a graph whose kernels are selected; `unfused` has the graph before operations were fused."""
    bare = variant(graph)[0]
    parts = _Parts(graph, unfused[bare]) if bare in unfused else None
    for index, node in enumerate(graph.nodes):
        yield Operation(
            graph=graph.name,
            index=index,
            op=node.op.name(),
            module=node.origin.module,
            layer=layer_of(node.origin.module),
            made_by=node.origin.made_by,
            parts=parts.of(node) if parts is not None else [],
            kernel=None if node.kernel is None else node.kernel.symbol,
            view=node.op.view,
            attributes=node.op.text(),
            operands=[None if value is None else value.name for value in node.operands],
            roles=list(graph.roles(node)),
            results=[f"{value.name}: {value.type}" for value in node.results],
            cost=graph.node_cost(node, graph.bounds),
        )


class _Parts:
    """Finds what a rewritten operation stands for by the names of its results, which passes keep."""

    def __init__(self, graph: Graph, unfused: Graph) -> None:
        self.made = {value.name: node for node in graph.nodes for value in node.results}
        self.unfused = unfused.producers
        self.by_name = {value.name: value for value in unfused.producers}

    def of(self, node: Node) -> list[str]:
        """Names of the operations between the node's operands and its results; none if it is one of them itself."""
        roots = {self.unfused[self.by_name[v.name]] for v in node.results if v.name in self.by_name}
        found = closure(roots, self.unfused, lambda value: value.name in self.made)
        if [part.op for part in found] == [node.op]:
            return []
        return [part.op.name() for part in dict.fromkeys(self.unfused.values()) if part in found]


def layer_costs(module: Module, plan: tuple[Layer, ...]) -> list[LayerCosts]:
    """Costs of every layer of the last stage."""
    decode, chunk = (costs_by_place(module, tokens) for tokens in ("fewest", "most"))
    made_by: dict[str, Counter[str]] = {layer.name: Counter() for layer in plan}
    weights: dict[str, dict[str, int]] = {layer.name: {} for layer in plan}
    for graph in chosen_graphs(module, "fewest").values():
        for node in graph.nodes:
            if layer_of(node.origin.module) in made_by and not node.op.view:
                made_by[layer_of(node.origin.module)][node.origin.made_by] += 1
        for weight in graph.weights:
            if layer_of(weight.name) in weights:
                weights[layer_of(weight.name)][weight.name] = weight.type.size_bytes
    return [
        LayerCosts(
            plan=layer,
            launches=decode.get(layer.name, NOTHING).launches,
            decode=decode.get(layer.name, NOTHING),
            chunk=chunk.get(layer.name, NOTHING),
            made_by=dict(made_by[layer.name]),
            weight_bytes=sum(weights[layer.name].values()),
        )
        for layer in plan
    ]


def costs_by_place(module: Module, tokens: str) -> dict[str, Cost]:
    """Cost of every layer, and of what stands beside the layers by the graph it stands in, at the graphs' bounds."""
    costs: dict[str, Cost] = {}
    for graph in chosen_graphs(module, tokens).values():
        for node in graph.nodes:
            place = layer_of(node.origin.module) or variant(graph)[0]
            costs[place] = costs.get(place, NOTHING) + graph.node_cost(node, graph.bounds)
    return costs


def stage_cost(
    module: Module, dims: Mapping[str, int], graph: str | None, layer: str | None
) -> tuple[int, Cost] | None:
    """Operations and cost of a step in the backbone, or in one graph or layer; None where there is no such thing."""
    total, count, found = Cost(), 0, False
    for name, chosen in chosen_graphs(module, "fewest").items():
        wanted = is_backbone(chosen) if graph is None and layer is None else graph in (None, name)
        for node in chosen.nodes if wanted else ():
            if layer in (None, layer_of(node.origin.module)):
                found, count = True, count + 1
                total += chosen.node_cost(node, dims)
    return (count, total) if found else None


def check_layer(plan: tuple[Layer, ...], layer: str) -> str:
    """The module path of a layer given as `3`, `layers.3` or `mtp.0`; UsageError names what there is."""
    name = f"layers.{layer}" if layer.isdigit() else layer
    if name not in {entry.name for entry in plan}:
        last = sum(entry.part != "draft" for entry in plan) - 1
        drafting = [entry.name for entry in plan if entry.part == "draft"]
        raise UsageError(f"layer: expected {' or '.join([f'0 to {last}', *drafting])}, got {layer!r}")
    return name


def wanted_graph(graph: Graph, name: str | None) -> bool:
    """Whether `name` means the graph: its name with or without its number of tokens, or None for every graph."""
    return name in (None, graph.name, variant(graph)[0])
