"""Planned memory, checked twice: graphs interpreted in one real arena, and places that live together compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from v41c.errors import VerifyError
from v41c.ir.graph import Graph, Node, Value
from v41c.ir.interpret import Interpreted
from v41c.passes.plan_memory import arena_bytes, stored_values

#: NaN as a float of any width, and no id or count that is ever meant
_POISON = 0xFF


def is_planned(graph: Graph) -> bool:
    """Whether every value that the arena holds has a place."""
    return all(value.offset is not None for value in stored_values(graph))


def interpret_in_arena(
    graph: Graph,
    inputs: Mapping[str, Tensor],
    weights: Callable[[Value], Tensor],
    states: Mapping[str, Tensor],
    record: Callable[[str, Tensor], None] | None = None,
) -> Interpreted:
    """As `interpret`, with every value in its place of one arena that is filled with NaN.

    Before an operation reads its operands, the whole places of its results and its workspace, at the graph's bounds,
    are filled with NaN: an operand that lies in any of them is lost, as it would be in an engine. What may run aside
    runs as late as it may.
    """
    arena = _Arena(graph)
    kept = {state: states[state.name].clone() for state in graph.states}
    kept |= {weight: weights(weight) for weight in graph.weights}
    for value in graph.inputs:
        arena.write(value, inputs[value.name])
    for node in _latest(graph):
        if not node.op.view:
            arena.poison(node)
        operands = [
            None if value is None else kept[value] if value in kept else arena.read(value) for value in node.operands
        ]
        results = node.op.reference(*operands)
        for place, (value, result) in enumerate(
            zip(node.results, results if isinstance(results, tuple) else (results,), strict=True)
        ):
            if value in arena.versions:
                kept[value] = result
                continue
            if node.op.view:
                arena.see(value, result)
            else:
                arena.write(value, result)
            if record is not None and place >= len(node.op.states):
                record(value.name, arena.read(value))
    return Interpreted(
        {value.name: arena.read(value) for value in graph.outputs},
        {name: kept[value] for name, value in graph.finals.items()},
    )


def _latest(graph: Graph) -> Iterator[Node]:
    """The nodes in order, but those that may run aside as late as they may: before the first that sees their result."""
    late: list[Node] = []
    for node in graph.nodes:
        due = [other for other in late if not set(other.results).isdisjoint(node.operands)]
        late = [other for other in late if other not in due]
        yield from due
        if node.kernel is not None and node.kernel.aside:
            late.append(node)
        else:
            yield node
    yield from late


class _Arena:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.versions = graph.state_versions
        self._memory = torch.full((arena_bytes(graph),), _POISON, dtype=torch.uint8)
        self._kinds: dict[Value, tuple[torch.dtype, torch.Size]] = {}

    def write(self, value: Value, tensor: Tensor) -> None:
        data = tensor.contiguous().reshape(-1).view(torch.uint8)
        begin, end = _place(value, self.graph)
        if len(data) > end - begin:
            raise VerifyError(f"graph {self.graph.name}: {value.name}: expected at most {end - begin} bytes")
        self._memory[begin : begin + len(data)] = data
        self.see(value, tensor)

    def see(self, value: Value, tensor: Tensor) -> None:
        """Read the value's place as this tensor's type from now on, whatever lies there."""
        self._kinds[value] = (tensor.dtype, tensor.shape)

    def read(self, value: Value) -> Tensor:
        dtype, shape = self._kinds[value]
        begin = _place(value, self.graph)[0]
        size = shape.numel() * dtype.itemsize
        return self._memory[begin : begin + size].clone().view(dtype).reshape(shape)

    def poison(self, node: Node) -> None:
        for _, begin, end in _written(node, self.graph):
            self._memory[begin:end] = _POISON


def overlaps(graph: Graph) -> Iterator[str]:
    """Pairs of places that share bytes at the graph's bounds while both are needed, said in words.

    A walk over the nodes with the list of what lives: nothing of how the plan was made is used.
    """
    owner = _owners(graph)
    last: dict[Value, int] = {}
    for index, node in enumerate(graph.nodes):
        done = graph.joins.get(node, index + 1) - 1
        for value in (*node.operands, *node.results):
            if value in owner:
                last[owner[value]] = max(last.get(owner[value], index), done)
    last |= {owner[value]: len(graph.nodes) for value in graph.outputs}
    alive = {value: _place(value, graph) for value in graph.inputs}
    for left, (begin, end) in alive.items():
        for right, (other, after) in alive.items():
            if left.name < right.name and begin < after and other < end:
                yield f"graph {graph.name}: inputs {left.name} and {right.name}"
    for index, node in enumerate(graph.nodes):
        alive = {value: place for value, place in alive.items() if last.get(value, -1) >= index}
        fresh = [] if node.op.view else list(_written(node, graph))
        others = [(value.name, *place) for value, place in alive.items()]
        for number, (name, begin, end) in enumerate(fresh):
            for rival, low, high in (*others, *fresh[:number]):
                if begin < high and low < end:
                    yield f"graph {graph.name}: node {index} ({node.op.name()}): {name} and {rival}"
        if not node.op.view:
            alive |= {value: _place(value, graph) for value in node.results if value in owner}


def _owners(graph: Graph) -> dict[Value, Value]:
    """Every value in the arena, and the one whose storage it is: a view's is its operand's."""
    owner = {value: value for value in graph.inputs}
    for node in graph.nodes:
        for value in node.results:
            if value not in graph.state_versions:
                source = node.operands[0]
                owner[value] = owner.get(source, value) if node.op.view and source is not None else value
    return owner


def _written(node: Node, graph: Graph) -> Iterator[tuple[str, int, int]]:
    """What a node writes to: name and bytes of its results and its workspace."""
    for value in node.results:
        if value not in graph.state_versions:
            yield (value.name, *_place(value, graph))
    kernel = node.kernel
    if kernel is not None and kernel.workspace_bytes:
        begin = kernel.workspace_offset or 0
        yield f"workspace of {kernel.symbol}", begin, begin + kernel.workspace_bytes


def _place(value: Value, graph: Graph) -> tuple[int, int]:
    """First byte, and the one after the last at the graph's bounds."""
    begin = value.offset or 0
    return begin, begin + value.type.bind(graph.bounds).size_bytes
