"""One launch for the projections of one input.

Before: a `linear` for each weight.
After:  a `linear_group` for up to four weights of one format that read the same value and give the same dtype.
Why:    fewer launches and forks, and the input is read and converted once: wq_a and wkv, the main and the indexer's
        wq_b, the compressor's wkv and wgate, the shared expert's w1 and w3, wkv of every draft layer. The time
        of a decode step does not change measurably (two threads, width 1024): its weights are what it waits for.
"""

from __future__ import annotations

from collections.abc import Iterator

from v41c.ir.graph import Graph, Module, Node
from v41c.ir.ops.linear import Linear
from v41c.ir.ops.linear_group import MOST, LinearGroup
from v41c.ir.rewrite import Fusion, fuse
from v41c.passes.context import PassContext

NAME = "merge-projections"


def run(module: Module, context: PassContext) -> Module:
    """A projection that shares its input with none stays as it is."""
    return Module(tuple(fuse(graph, _groups(graph), NAME) for graph in module))


def _groups(graph: Graph) -> Iterator[Fusion]:
    alike: dict[object, list[Node]] = {}
    for node in graph.nodes:
        x, weight = node.operands[:2] if isinstance(node.op, Linear) else (None, None)
        if isinstance(node.op, Linear) and weight is not None:
            alike.setdefault((x, weight.type.dtype, node.op.out), []).append(node)
    for nodes in alike.values():
        for begin in range(0, len(nodes) - 1, MOST):
            yield _merged(tuple(nodes[begin : begin + MOST]))


def _merged(group: tuple[Node, ...]) -> Fusion:
    missing = (None,) * (MOST - len(group))
    weights = tuple(node.operands[1] for node in group) + missing
    scales = tuple(node.operands[2] for node in group) + missing
    results = tuple(node.results[0] for node in group)
    op = LinearGroup(group[0].op.attributes()["out"])
    return Fusion(group, op, (group[0].operands[0], *weights, *scales), results)
