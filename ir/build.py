"""Building graphs: the one way nodes are made, by the tracer, the passes and the tests."""

from __future__ import annotations

from v41c.ir.graph import Graph, Node, Origin, Value
from v41c.ir.op import Op
from v41c.ir.types import TensorType


class Builder:
    """Collects inputs, weights, states and nodes of one graph; types of results come from `infer`."""

    def __init__(self, name: str, made_by: str = "trace") -> None:
        self.name = name
        self.made_by = made_by
        self.inputs: list[Value] = []
        self.weights: dict[str, Value] = {}
        self.states: list[Value] = []
        self.nodes: list[Node] = []
        self._names: set[str] = set()
        self._current: dict[str, Value] = {}
        self._state_of: dict[Value, str] = {}

    def unique(self, name: str) -> str:
        """`name`, or `name.2`, `name.3`, … when it is taken."""
        candidate, count = name, 1
        while candidate in self._names:
            count += 1
            candidate = f"{name}.{count}"
        self._names.add(candidate)
        return candidate

    def input(self, name: str, type: TensorType) -> Value:
        """Declare an input."""
        value = Value(self.unique(name), type)
        self.inputs.append(value)
        return value

    def weight(self, name: str, type: TensorType) -> Value:
        """Declare a weight by checkpoint name, once."""
        if name not in self.weights:
            self.weights[name] = Value(self.unique(name), type)
        return self.weights[name]

    def state(self, name: str, type: TensorType) -> Value:
        """Declare a state."""
        value = Value(self.unique(name), type)
        self.states.append(value)
        self._current[name] = value
        self._state_of[value] = name
        return value

    def current(self, state: str) -> Value:
        """The version of a state that stands now."""
        return self._current[state]

    def apply(
        self, op: Op, *operands: Value | None, names: tuple[str, ...] = (), module: str = "", made_by: str = ""
    ) -> tuple[Value, ...]:
        """Append a node and return its results, named `names` or after module and operation."""
        types = op.infer_results(tuple(None if value is None else value.type for value in operands))
        stem = f"{module}.{op.name()}" if module else op.name()
        wanted = names or tuple(stem for _ in types)
        results = tuple(Value(self.unique(name), type) for name, type in zip(wanted, types, strict=True))
        node = Node(op, operands, results, Origin(module, made_by or self.made_by))
        self.nodes.append(node)
        for old, new in node.consumed:
            name = self._state_of[old]
            self._current[name] = new
            self._state_of[new] = name
        return results

    def finish(self, *outputs: Value) -> Graph:
        """The verified graph; weights that no node uses are dropped."""
        graph = Graph(
            self.name,
            tuple(self.inputs),
            tuple(self.weights.values()),
            tuple(self.states),
            tuple(self.nodes),
            outputs,
            dict(self._current),
        ).with_nodes(self.nodes)
        graph.verify()
        return graph
