"""Scoring of candidate rows only (DeepSeek-V4.1 report, section 2.3.2).

Before: `index_topk` scores every visible row and lets the token's candidate blocks pass.
After:  `index_candidates` scores the rows of those blocks.
Why:    the later indexers of the decoder then cost the same at any context: blocks · block rows a token at most. While
        the context is shorter than that, nothing is saved and nothing lost.
"""

from __future__ import annotations

from dataclasses import replace

from v41c.ir.graph import Graph, Module, Node
from v41c.ir.ops.index_candidates import IndexCandidates
from v41c.ir.ops.index_topk import IndexTopk
from v41c.passes.context import PassContext

NAME = "restrict-candidates"


def run(module: Module, context: PassContext) -> Module:
    """Selections without candidates stay as they are."""
    return Module(tuple(_restrict(graph) for graph in module))


def _restrict(graph: Graph) -> Graph:
    return graph.with_nodes(_restricted(node) for node in graph.nodes)


def _restricted(node: Node) -> Node:
    if not isinstance(node.op, IndexTopk) or node.operand("pool") is None:
        return node
    op = IndexCandidates(**node.op.attributes())
    return replace(node, op=op, origin=replace(node.origin, made_by=NAME))
