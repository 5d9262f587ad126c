"""Inputs of products as packed fp8 rows: by default where tensor cores apply scales, else if `+pack-activations` asks.

Before: boundaries, norms of latents and grouped projections write the round trip of a result as bf16, for products.
After:  they write e4m3 codes and scales, packed rows of 33/64 of the bytes, which the products read.
Why:    the values are the same, exactly; fewer bytes are written once and read by every block of a product, and tensor
        cores that apply scales multiply them as they are. Only where all readers are products, and on targets whose
        products read such rows.
"""

from __future__ import annotations

from dataclasses import replace

from v41c.errors import UsageError
from v41c.ir.graph import Graph, Module, Node, Value
from v41c.ir.op import Op
from v41c.ir.rewrite import Rewriter
from v41c.ir.types import DType
from v41c.passes.context import Machine, PassContext

NAME = "pack-activations"


def run(module: Module, context: PassContext) -> Module:
    """Packs in every graph; UsageError where the target's products read no packed rows."""
    if context.machine is not None and not context.machine.packs_activations:
        raise UsageError(
            f"--passes: {NAME}: expected a target whose products read packed activations, got {context.machine.name}"
        )
    graphs = tuple(_pack(graph) for graph in module)
    return module if all(new is old for new, old in zip(graphs, module, strict=True)) else Module(graphs)


def is_default(machine: Machine) -> bool:
    """Elsewhere products make floats of what they read, which costs about what the bytes are worth."""
    return machine.packs_activations and machine.has_block_scaled_mma


def _pack(graph: Graph) -> Graph:
    rewriter = Rewriter(NAME)
    for node in graph.nodes:
        packing = node.op.packing()
        if packing is not None and _is_for_products(graph, node.results[packing[1]]):
            _put_packed(rewriter, node, *packing)
        else:
            rewriter.keep(node)
    return rewriter.finish(graph) if rewriter.replacements else graph


def _is_for_products(graph: Graph, value: Value) -> bool:
    """Whether products alone read rows of bf16, as all of the inputs that they may have packed."""
    if value.type.dtype != DType.BF16 or len(value.type.shape) != 2:
        return False
    readers = graph.users.get(value, [])
    return bool(readers) and value not in graph.outputs and all(_reads_packed(reader, value) for reader in readers)


def _reads_packed(reader: Node, value: Value) -> bool:
    named = zip((declared.name for declared in reader.op.operands()), reader.operands, strict=True)
    return all((operand is value) == (name in reader.op.packable) for name, operand in named)


def _put_packed(rewriter: Rewriter, node: Node, op: Op, place: int) -> None:
    """The operation with packed rows in place of a rounded result, under a name of their own."""
    operands = rewriter.operands(node)
    types = op.infer_results(tuple(None if value is None else value.type for value in operands))
    rows = Value(f"{node.results[place].name}.packed", types[place])
    rewriter.replacements[node.results[place]] = rows
    results = tuple(rows if index == place else result for index, result in enumerate(node.results))
    rewriter.nodes.append(
        replace(node, op=op, operands=operands, results=results, origin=replace(node.origin, made_by=NAME))
    )
