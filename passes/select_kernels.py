"""The kernel that serves every operation on the target, for each token count that programs are compiled for.

Before: graphs that serve any number of tokens, without kernels.
After:  one copy of each graph per variant, `decoder:1`, `decoder:512`, with its bounds, and a kernel on every node.
Why:    a single token is bound by memory and many by arithmetic; the choice is made once, here, and never at run time.
        An operation that the target cannot serve at these types is refused now.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from v41c.ir.graph import Graph, Module, Node, Selected, Value
from v41c.passes.context import PassContext

NAME = "select-kernels"
#: most rows of one step that get logits: a row of a large vocabulary is big, and nothing needs more
MAX_ROWS = 64


def run(module: Module, context: PassContext) -> Module:
    """Raises UnsupportedError, naming operation, target and reason, where there is no kernel."""
    return Module(tuple(_variant(graph, step, context) for graph in module for step in _steps(graph, context)))


def _steps(graph: Graph, context: PassContext) -> list[Mapping[str, int]]:
    """T and R of the steps that a graph is compiled for: tokens and rows, or of the vision tower patches and rows."""
    if graph.name == "vision":
        return [context.images]
    return [{"T": tokens, "R": min(tokens, MAX_ROWS)} for tokens in context.variants]


def _variant(graph: Graph, step: Mapping[str, int], context: PassContext) -> Graph:
    bounds = {**context.bounds, **step}
    nodes = tuple(select(node, bounds, context) for node in graph.nodes)
    used = {symbol for value in _values(graph) for symbol in value.type.symbols}
    kept = {name: bound for name, bound in bounds.items() if name in used}
    return replace(graph, name=f"{graph.name}:{step['T']}", nodes=nodes, bounds=kept)


def select(node: Node, bounds: Mapping[str, int], context: PassContext) -> Node:
    """The node with its kernel for steps within the bounds; a view needs none."""
    if node.op.view:
        return node
    operands = tuple(None if value is None else value.type for value in node.operands)
    kernel = context.kernel_for(node.op, operands, tuple(result.type for result in node.results), bounds)
    return replace(node, kernel=Selected(kernel.symbol, kernel.workspace_bytes))


def _values(graph: Graph) -> list[Value]:
    results = [result for node in graph.nodes for result in node.results]
    return [*graph.inputs, *graph.states, *results]
