"""One arena per program: a place for every value and every kernel's workspace.

Before: values without a place.
After:  every input, result and workspace has a byte offset; places are shared by values that never live together.
Why:    the peak of a step is known when the engine is compiled, does not depend on the prompt, and nothing is allocated
        while a request runs. Values are placed largest first at the lowest offset that is free for their lifetime.
        What a kernel that runs aside reads and writes keeps its place until somebody has waited for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from v41c.ir.graph import Graph, Module, Node, Value
from v41c.passes.context import PassContext

NAME = "plan-memory"
ALIGNMENT_BYTES = 64


def run(module: Module, context: PassContext) -> Module:
    """Graphs whose kernels are selected get offsets."""
    return Module(tuple(_place(graph, share=True) for graph in module))


def place_apart(module: Module) -> Module:
    """Offsets without sharing, for engines compiled without this pass."""
    return Module(tuple(_place(graph, share=False) for graph in module))


def arena_bytes(graph: Graph) -> int:
    """Size of the arena of a planned graph: the peak memory of its inputs, results and workspaces."""
    ends = [0]
    for value in stored_values(graph):
        if value.offset is not None:
            ends.append(value.offset + value.type.bind(graph.bounds).size_bytes)
    for node in graph.nodes:
        if node.kernel is not None and node.kernel.workspace_offset is not None:
            ends.append(node.kernel.workspace_offset + node.kernel.workspace_bytes)
    return _align(max(ends))


def stored_values(graph: Graph) -> Iterator[Value]:
    """Inputs and node results that live in the arena: everything but weights and states."""
    states = graph.state_versions
    yield from graph.inputs
    for node in graph.nodes:
        yield from (result for result in node.results if result not in states)


@dataclass(eq=False)
class _Block:
    """A piece of memory and the interval of node numbers in which it is needed."""

    size: int
    begin: int
    end: int
    offset: int = -1


def _place(graph: Graph, share: bool) -> Graph:
    blocks: dict[Value, _Block] = {}
    workspaces: dict[Node, _Block] = {}
    last = len(graph.nodes)
    for value in graph.inputs:
        blocks[value] = _Block(_size(value, graph), -1, -1)
    states = graph.state_versions
    for index, node in enumerate(graph.nodes):
        done = graph.joins.get(node, index + 1) - 1
        for operand in node.operands:
            if operand is not None and operand in blocks:
                blocks[operand].end = max(blocks[operand].end, done)
        for result in node.results:
            if result in states:
                continue
            source = node.operands[0] if node.op.view else None
            shared = blocks.get(source) if source is not None else None
            blocks[result] = shared or _Block(_size(result, graph), index, done)
        if node.kernel is not None and node.kernel.workspace_bytes:
            workspaces[node] = _Block(_align(node.kernel.workspace_bytes), index, done)
    for value in graph.outputs:
        blocks[value].end = last
    _assign([*dict.fromkeys(blocks.values()), *workspaces.values()], share)
    return _apply(graph, blocks, workspaces)


def _size(value: Value, graph: Graph) -> int:
    return _align(value.type.bind(graph.bounds).size_bytes)


def _align(size: int) -> int:
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _assign(blocks: list[_Block], share: bool) -> None:
    if not share:
        offset = 0
        for block in blocks:
            block.offset, offset = offset, offset + block.size
        return
    placed: list[_Block] = []
    for block in sorted(blocks, key=lambda b: (-b.size, b.begin)):
        rivals = sorted(
            (other for other in placed if other.begin <= block.end and block.begin <= other.end),
            key=lambda other: other.offset,
        )
        offset = 0
        for other in rivals:
            if offset + block.size <= other.offset:
                break
            offset = max(offset, other.offset + other.size)
        block.offset = offset
        placed.append(block)


def _apply(graph: Graph, blocks: dict[Value, _Block], workspaces: dict[Node, _Block]) -> Graph:
    moved = {value: replace(value, offset=block.offset) for value, block in blocks.items()}

    def now(value: Value) -> Value:
        return moved.get(value, value)

    nodes = []
    for node in graph.nodes:
        kernel = node.kernel
        if kernel is not None and node in workspaces:
            kernel = replace(kernel, workspace_offset=workspaces[node].offset)
        operands = tuple(None if value is None else now(value) for value in node.operands)
        nodes.append(replace(node, operands=operands, results=tuple(map(now, node.results)), kernel=kernel))
    return replace(
        graph, nodes=tuple(nodes), inputs=tuple(map(now, graph.inputs)), outputs=tuple(map(now, graph.outputs))
    )
