"""Inputs of products as packed fp8 rows. Off unless asked for: `--passes +pack-activations`.

Before: `mhc_boundary` and `mhc_enter` write the round trip of a sublayer's input as bf16, for products to read.
After:  they write e4m3 codes and scales, packed rows of 33/64 of the bytes, which the products read.
Why:    the values are the same, exactly; fewer bytes are written once and read by every block of a product. Only
        where all readers are products, and on targets whose products unpack rows as they read them.
"""

from __future__ import annotations

from dataclasses import replace

from v41c.errors import UsageError
from v41c.ir import packed
from v41c.ir.graph import Graph, Module, Node, Value
from v41c.ir.ops.mhc_boundary import MhcBoundary
from v41c.ir.ops.mhc_enter import MhcEnter
from v41c.ir.rewrite import Rewriter
from v41c.ir.types import DType
from v41c.passes.context import PassContext

NAME = "pack-activations"


def run(module: Module, context: PassContext) -> Module:
    """Packs in every graph; UsageError where the target's products read no packed rows."""
    if context.machine is not None and not context.machine.packs_activations:
        raise UsageError(
            f"--passes: {NAME}: expected a target whose products read packed activations, got {context.machine.name}"
        )
    graphs = tuple(_pack(graph) for graph in module)
    return module if all(new is old for new, old in zip(graphs, module, strict=True)) else Module(graphs)


def _pack(graph: Graph) -> Graph:
    rewriter = Rewriter(NAME)
    for node in graph.nodes:
        rounded = _rounded(node)
        if rounded is not None and _is_for_products(graph, rounded):
            _put_packed(rewriter, node, rounded)
        else:
            rewriter.keep(node)
    return rewriter.finish(graph) if rewriter.replacements else graph


def _rounded(node: Node) -> Value | None:
    """The result of a boundary that could be packed rows: behind the norm's."""
    op = node.op
    if not isinstance(op, MhcBoundary | MhcEnter) or op.packed or op.format != packed.FORMAT:
        return None
    rounded = node.results[2 if isinstance(op, MhcBoundary) else 1]
    return rounded if rounded.type.dtype == DType.BF16 else None


def _is_for_products(graph: Graph, value: Value) -> bool:
    """Whether products alone read a value, as all of the inputs that they may have packed."""
    readers = graph.users.get(value, [])
    return bool(readers) and value not in graph.outputs and all(_reads_packed(reader, value) for reader in readers)


def _reads_packed(reader: Node, value: Value) -> bool:
    named = zip((declared.name for declared in reader.op.operands()), reader.operands, strict=True)
    return all((operand is value) == (name in reader.op.packable) for name, operand in named)


def _put_packed(rewriter: Rewriter, node: Node, rounded: Value) -> None:
    """The operation with packed rows in place of a rounded result, under a name of their own."""
    op = replace(node.op, packed=True)  # type: ignore[call-arg]  # both kinds of boundary have it
    operands = rewriter.operands(node)
    types = op.infer_results(tuple(None if value is None else value.type for value in operands))
    rows = Value(f"{rounded.name}.packed", types[node.results.index(rounded)])
    rewriter.replacements[rounded] = rows
    results = tuple(rows if result is rounded else result for result in node.results)
    rewriter.nodes.append(
        replace(node, op=op, operands=operands, results=results, origin=replace(node.origin, made_by=NAME))
    )
