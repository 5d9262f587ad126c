"""Rebuilding graphs in passes: copy nodes in order, replacing values as the pass decides."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from v41c.ir.graph import Graph, Node, Origin, Value
from v41c.ir.op import Op


class Rewriter:
    """Copies a graph node by node. `replacements` maps values of the old graph to values of the new one."""

    def __init__(self, made_by: str) -> None:
        self.made_by = made_by
        self.replacements: dict[Value, Value] = {}
        self.nodes: list[Node] = []

    def now(self, value: Value) -> Value:
        """The value that stands for an old one."""
        return self.replacements.get(value, value)

    def operands(self, node: Node) -> tuple[Value | None, ...]:
        """The node's operands in the new graph."""
        return tuple(None if value is None else self.now(value) for value in node.operands)

    def keep(self, node: Node) -> None:
        """Copy a node; it stays the same object when none of its operands changed."""
        operands = self.operands(node)
        self.nodes.append(node if operands == node.operands else replace(node, operands=operands))

    def put(self, node: Node, op: Op, *operands: Value | None) -> None:
        """Another operation in a node's place, whose results keep the node's names and stand for its results."""
        types = op.infer_results(tuple(None if value is None else value.type for value in operands))
        results = tuple(Value(old.name, type) for old, type in zip(node.results, types, strict=True))
        self.replacements |= dict(zip(node.results, results, strict=True))
        origin = replace(node.origin, made_by=self.made_by)
        self.nodes.append(Node(op, operands, results, origin))

    def drop(self, node: Node, stand_in: Value) -> None:
        """Leave a node of one result out; `stand_in`, of the new graph, stands for its result."""
        (result,) = node.results
        self.replacements[result] = stand_in

    def finish(self, graph: Graph) -> Graph:
        """`graph` with the new nodes, and its inputs, weights, states, outputs and finals replaced."""
        return graph.with_nodes(
            self.nodes,
            inputs=self.all(graph.inputs),
            weights=self.all(graph.weights),
            states=self.all(graph.states),
            outputs=self.all(graph.outputs),
            finals={name: self.now(value) for name, value in graph.finals.items()},
        )

    def all(self, values: Iterable[Value]) -> tuple[Value, ...]:
        """`now` of every value."""
        return tuple(self.now(value) for value in values)


def closure(roots: Iterable[Node], producers: dict[Value, Node], stop: Callable[[Value], bool]) -> set[Node]:
    """`roots` and every node they depend on, not looking behind values for which `stop` holds."""
    found: set[Node] = set()
    pending = list(roots)
    while pending:
        node = pending.pop()
        if node in found:
            continue
        found.add(node)
        for value in node.operands:
            if value is not None and value in producers and not stop(value):
                pending.append(producers[value])
    return found


@dataclass(frozen=True)
class Fusion:
    """Nodes that one node takes the place of: it stands where `parts[0]` stood, and keeps results others still read."""

    parts: tuple[Node, ...]
    op: Op
    operands: tuple[Value | None, ...]
    results: tuple[Value, ...]


def fuse(graph: Graph, fusions: Iterable[Fusion], made_by: str) -> Graph:
    """`graph` with every fusion made; nodes that a fused one now waits for come before it."""
    placed: dict[Node, Node] = {}
    gone: set[Node] = set()
    for fusion in fusions:
        origin = Origin(fusion.parts[0].origin.module, made_by)
        placed[fusion.parts[0]] = Node(fusion.op, fusion.operands, fusion.results, origin)
        gone.update(fusion.parts)
    if not placed:
        return graph
    return graph.with_nodes(_ordered([placed.get(n, n) for n in graph.nodes if n in placed or n not in gone]))


def _ordered(nodes: list[Node]) -> list[Node]:
    """The nodes in order, but none before what makes its operands, nor a writer of a state before its readers."""
    producers = {result: node for node in nodes for result in node.results}
    readers: dict[Value, list[Node]] = {}
    for node in nodes:
        for value in node.operands:
            if value is not None:
                readers.setdefault(value, []).append(node)
    done: dict[Node, None] = {}
    open_: set[Node] = set()

    def visit(node: Node) -> None:
        if node in open_:
            return
        open_.add(node)
        for value in node.operands:
            if value in producers:
                visit(producers[value])
        for old, _ in node.consumed:
            for reader in readers[old]:
                visit(reader)
        done[node] = None

    for node in nodes:
        visit(node)
    return list(done)


def only_user(graph: Graph, value: Value, kind: type[Op]) -> Node | None:
    """The operation of a kind that is the only one to read a value, if there is one."""
    users = graph.users.get(value, [])
    alone = len(users) == 1 and isinstance(users[0].op, kind) and value not in graph.outputs
    return users[0] if alone else None
