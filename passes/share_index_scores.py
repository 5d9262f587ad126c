"""One scan of the index keys for both selections of the candidate source (DeepSeek-V4.1 report, section 2.3.2).

Before: `index_topk` and `candidate_blocks` of the layer whose pool later indexers share each score every visible row.
After:  `index_topk_blocks` scores them once, and makes the selection and the pool.
Why:    behind a long context these scans are most of a decode step. On targets with a kernel for both.
"""

from __future__ import annotations

from dataclasses import replace

from v41c.ir.graph import Graph, Module, Node
from v41c.ir.ops.candidate_blocks import CandidateBlocks
from v41c.ir.ops.index_topk import IndexTopk
from v41c.ir.ops.index_topk_blocks import IndexTopkBlocks
from v41c.passes.context import PassContext

NAME = "share-index-scores"


def run(module: Module, context: PassContext) -> Module:
    """Shares in every graph; no graph changes without a machine that has the kernel."""
    if context.machine is None or not context.machine.shares_index_scores:
        return module
    return Module(tuple(_share(graph) for graph in module))


def _share(graph: Graph) -> Graph:
    shared: dict[Node, Node] = {}
    selections = [node for node in graph.nodes if isinstance(node.op, IndexTopk)]
    for pool in (node for node in graph.nodes if isinstance(node.op, CandidateBlocks)):
        rows = next((rows for rows in selections if _scores_alike(rows, pool)), None)
        if rows is not None:
            shared[rows] = shared[pool] = _shared(rows, pool)
    # the first of both has all operands of the second
    nodes = dict.fromkeys(shared.get(node, node) for node in graph.nodes)
    return graph.with_nodes(nodes) if shared else graph


def _scores_alike(rows: Node, pool: Node) -> bool:
    """Every row under the same score: the same operands, and none that restricts one of both."""
    same = all(one is other for one, other in zip(rows.operands, (*pool.operands, None), strict=True))
    return same and all(getattr(rows.op, name) == getattr(pool.op, name) for name in ("ratio", "scale"))


def _shared(rows: Node, pool: Node) -> Node:
    chosen, blocks = rows.op.attributes(), pool.op.attributes()
    op = IndexTopkBlocks(chosen["ratio"], chosen["topk"], blocks["blocks"], blocks["block"], chosen["scale"])
    return replace(
        rows,
        op=op,
        operands=pool.operands,
        results=(*rows.results, *pool.results),
        origin=replace(rows.origin, made_by=NAME),
    )
