"""Graphs and modules: SSA values, nodes with provenance, linear states, and the verifier."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from v41c.errors import VerifyError
from v41c.ir.op import Cost, Op, cost_of
from v41c.ir.types import TensorType


@dataclass(frozen=True, eq=False)
class Value:
    """A value: defined once, by an input, a weight, a state's initial version, or a node.

    `offset` is its place in the arena in bytes, once memory is planned; weights and states have none.
    """

    name: str
    type: TensorType
    offset: int | None = None

    def __repr__(self) -> str:
        return f"{self.name}: {self.type}"


@dataclass(frozen=True)
class Origin:
    """Where an operation comes from: the module of the eager model, and the pass that made it."""

    module: str
    made_by: str


@dataclass(frozen=True)
class Selected:
    """The kernel that serves a node: its symbol, and scratch memory in bytes at `workspace_offset` of the arena.

    One that is `aside` may run beside the nodes that follow, until one reads a result of it: see `Graph.joins`.
    """

    symbol: str
    workspace_bytes: int = 0
    workspace_offset: int | None = None
    aside: bool = False


@dataclass(frozen=True, eq=False)
class Node:
    """One application of an operation; `kernel` is set once kernels are selected, except for views."""

    op: Op
    operands: tuple[Value | None, ...]
    results: tuple[Value, ...]
    origin: Origin
    kernel: Selected | None = None

    def operand(self, name: str) -> Value | None:
        """The operand of that declared name."""
        for declared, value in zip(self.op.operands(), self.operands, strict=True):
            if declared.name == name:
                return value
        raise KeyError(f"{self.op.name()} has no operand {name}")

    @property
    def consumed(self) -> tuple[tuple[Value, Value], ...]:
        """Pairs of a state version that the node consumes and the version it returns."""
        states = [self.operand(name) for name in self.op.states]
        return tuple((old, new) for old, new in zip(states, self.results, strict=False) if old is not None)


@dataclass(frozen=True, eq=False)
class Graph:
    """A verified-on-demand SSA graph.

    `weights` are named as in the checkpoint (a stack over experts has `{}` in place of the expert number). `states`
    are the first versions; `finals` maps a state's name to the version that stands when the graph ends. `bounds` are
    the largest values of symbolic dimensions that the selected kernels serve, empty before kernels are selected.
    """

    name: str
    inputs: tuple[Value, ...]
    weights: tuple[Value, ...]
    states: tuple[Value, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Value, ...]
    finals: Mapping[str, Value] = field(default_factory=dict)
    bounds: Mapping[str, int] = field(default_factory=dict)

    def with_nodes(self, nodes: Iterable[Node], **changes: object) -> Graph:
        """A copy with other nodes; weights and states nobody uses any more are dropped."""
        kept = tuple(nodes)
        used = {id(value) for node in kept for value in node.operands if value is not None}
        graph = replace(self, nodes=kept, **changes)  # type: ignore[arg-type]
        return replace(
            graph,
            weights=tuple(weight for weight in graph.weights if id(weight) in used),
            states=tuple(state for state in graph.states if id(state) in used),
            finals={state.name: graph.finals[state.name] for state in graph.states if id(state) in used},
        )

    @cached_property
    def producers(self) -> dict[Value, Node]:
        """The node that defines each node-defined value."""
        return {result: node for node in self.nodes for result in node.results}

    @cached_property
    def users(self) -> dict[Value, list[Node]]:
        """The nodes that read each value, in order; a graph output without readers has none."""
        found: dict[Value, list[Node]] = {value: [] for node in self.nodes for value in node.results}
        for node in self.nodes:
            for value in node.operands:
                if value is not None:
                    found.setdefault(value, []).append(node)
        return found

    def roles(self, node: Node) -> tuple[str, ...]:
        """For every operand of `node`: "weight", "state" or "activation"."""
        weights, states = self._weights, self.state_versions
        return tuple(
            "weight" if value in weights else "state" if value in states else "activation" for value in node.operands
        )

    @cached_property
    def _weights(self) -> frozenset[Value]:
        return frozenset(self.weights)

    @cached_property
    def state_versions(self) -> dict[Value, str]:
        """Every version of every state, with the state's name."""
        versions = {state: state.name for state in self.states}
        for node in self.nodes:
            for old, new in node.consumed:
                versions[new] = versions[old]
        return versions

    @cached_property
    def joins(self) -> dict[Node, int]:
        """For each node that runs aside, the number of the first one that waits for it: it reads a result of it, or of
        a view of that, and is no view. The number of nodes where none does.
        """
        found: dict[Node, int] = {}
        makers: dict[Value, Node] = {}
        for index, node in enumerate(self.nodes):
            for maker in [makers[value] for value in node.operands if value in makers]:
                if node.op.view:
                    makers |= dict.fromkeys(node.results, maker)
                else:
                    found.setdefault(maker, index)
            if node.kernel is not None and node.kernel.aside:
                makers |= dict.fromkeys(node.results, node)
        return dict.fromkeys(makers.values(), len(self.nodes)) | found

    def cost(self, dims: Mapping[str, int]) -> Cost:
        """Summed cost of every node at given dimensions."""
        return sum((self.node_cost(node, dims) for node in self.nodes), Cost())

    def node_cost(self, node: Node, dims: Mapping[str, int]) -> Cost:
        """Cost of one node at given dimensions."""
        types = tuple(None if value is None else value.type for value in node.operands)
        return cost_of(node.op, types, tuple(r.type for r in node.results), self.roles(node), dims)

    def verify(self) -> None:
        """Raise VerifyError, naming the node, when a rule is broken.

        Rules: names unique; operands defined before use; result types as `infer` says; a state version read or
        consumed only while it is the current one, consumed at most once; finals are the last versions; what runs aside
        has no states, which others may write meanwhile.
        """
        _Verifier(self).run()


@dataclass(frozen=True, eq=False)
class Module:
    """The graphs of one model, by name."""

    graphs: tuple[Graph, ...]

    def __getitem__(self, name: str) -> Graph:
        for graph in self.graphs:
            if graph.name == name:
                return graph
        raise KeyError(f"no graph {name}: there are {', '.join(graph.name for graph in self.graphs)}")

    def __contains__(self, name: str) -> bool:
        return any(graph.name == name for graph in self.graphs)

    def __iter__(self) -> Iterator[Graph]:
        return iter(self.graphs)

    def verify(self) -> None:
        """Verify every graph; states of one name must have one type in all graphs."""
        seen: dict[str, TensorType] = {}
        for graph in self.graphs:
            graph.verify()
            for state in graph.states:
                if seen.setdefault(state.name, state.type) != state.type:
                    raise VerifyError(
                        f"graph {graph.name}: state {state.name}: expected {seen[state.name]}, got {state.type}"
                    )


class _Verifier:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.where = f"graph {graph.name}"
        self.defined: set[Value] = set()
        self.names: set[str] = set()
        self.current: dict[str, Value] = {}
        self.version_of: dict[Value, str] = {}

    def run(self) -> None:
        for group in (self.graph.inputs, self.graph.weights, self.graph.states):
            for value in group:
                self.define(value)
        for state in self.graph.states:
            self.current[state.name] = state
            self.version_of[state] = state.name
        for index, node in enumerate(self.graph.nodes):
            self.where = f"graph {self.graph.name}: node {index} ({node.op.name()}, {node.origin.module or 'model'})"
            self.check(node)
        self.where = f"graph {self.graph.name}"
        for value in self.graph.outputs:
            self.require(value in self.defined, f"output {value.name} is not defined")
        self.require(
            set(self.graph.finals) == set(self.current),
            f"finals: expected {sorted(self.current)}, got {sorted(self.graph.finals)}",
        )
        for name, value in self.graph.finals.items():
            self.require(self.current[name] is value, f"state {name}: final {value.name} is not its last version")

    def require(self, condition: bool, what: str) -> None:
        if not condition:
            raise VerifyError(f"{self.where}: {what}")

    def define(self, value: Value) -> None:
        self.require(value.name not in self.names, f"value {value.name} is defined twice")
        self.names.add(value.name)
        self.defined.add(value)

    def check(self, node: Node) -> None:
        for value in node.operands:
            if value is None:
                continue
            self.require(value in self.defined, f"operand {value.name} is used before it is defined")
            if value in self.version_of:
                name = self.version_of[value]
                self.require(
                    self.current[name] is value,
                    f"state {name}: version {value.name} is stale, {self.current[name].name} is current",
                )
        for declared, value in zip(node.op.operands(), node.operands, strict=False):
            if declared.state and value is not None:
                self.require(value in self.version_of, f"operand {declared.name}: {value.name} is not a state")
        try:
            types = node.op.infer_results(tuple(None if v is None else v.type for v in node.operands))
        except VerifyError as error:
            raise VerifyError(f"{self.where}: {error}") from None
        found = tuple(result.type for result in node.results)
        self.require(
            types == found,
            f"results: expected ({', '.join(map(str, types))}), got ({', '.join(map(str, found))})",
        )
        aside = node.kernel is not None and node.kernel.aside
        self.require(not (aside and self.version_of.keys() & set(node.operands)), "runs aside, but reads a state")
        for old, new in node.consumed:
            name = self.version_of[old]
            self.current[name] = new
            self.version_of[new] = name
        for result in node.results:
            self.define(result)
