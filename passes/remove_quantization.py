"""Exact arithmetic, the checking mode: f32 everywhere, no round trip of activations or caches, f32 weights.

Before: bf16 activations, `round_trip` operations, packed u8 caches, weights as stored.
After:  f32 activations and caches, no `round_trip`, weights declared f32 (the loader dequantises them exactly).
Why:    the release's roundings amplify any difference in summation order; without them an engine can be held to
        equality with the eager model, end to end. Engram tables stay as stored: they are read by rows, exactly.
"""

from __future__ import annotations

from dataclasses import fields, replace

from v41c.ir.graph import Graph, Module, Node, Value
from v41c.ir.op import Op
from v41c.ir.ops.cache_write import CacheWrite
from v41c.ir.ops.engram_lookup import EngramLookup
from v41c.ir.ops.moe_experts import MoeExperts
from v41c.ir.ops.round_trip import RoundTrip
from v41c.ir.ops.window_write import WindowWrite
from v41c.ir.rewrite import Rewriter
from v41c.ir.types import DType, TensorType
from v41c.passes.context import Numbers, PassContext

NAME = "remove-quantization"
NUMBERS = Numbers("exact arithmetic leaves out the roundings of activations and caches")
_STORED = (DType.BF16, DType.F8E4M3, DType.F4E2M1)


def run(module: Module, context: PassContext) -> Module:
    """Applies in "exact" arithmetic; otherwise the module is returned as it is."""
    if context.arithmetic != "exact":
        return module
    widths = _state_widths(module)
    return Module(tuple(_rewrite(graph, widths) for graph in module))


def _state_widths(module: Module) -> dict[str, int]:
    """Elements of a row of every packed state, from the operation that writes it."""
    widths: dict[str, int] = {}
    for graph in module:
        versions = graph.state_versions
        for node in graph.nodes:
            if isinstance(node.op, WindowWrite | CacheWrite):
                state, rows = node.operands[:2]
                if state is not None and rows is not None:
                    widths[versions[state]] = int(rows.type.shape[-1])
    return widths


def _rewrite(graph: Graph, widths: dict[str, int]) -> Graph:
    rewriter = Rewriter(NAME)
    tables = {id(value) for node in graph.nodes if isinstance(node.op, EngramLookup) for value in node.operands}
    for value in graph.inputs + graph.weights:
        if value.type.dtype in _STORED and id(value) not in tables:
            rewriter.replacements[value] = Value(value.name, TensorType(DType.F32, value.type.shape))
    for state in graph.states:
        if state.type.dtype == DType.U8:
            shape = (*state.type.shape[:-1], widths[state.name])
            rewriter.replacements[state] = Value(state.name, TensorType(DType.F32, shape))
    for node in graph.nodes:
        if isinstance(node.op, RoundTrip):
            (source,) = node.operands
            if source is not None:
                rewriter.drop(node, rewriter.now(source))
        else:
            rewriter.put(node, _exact(node.op), *_operands(node, rewriter))
    return rewriter.finish(graph)


def _operands(node: Node, rewriter: Rewriter) -> tuple[Value | None, ...]:
    """Operands in the new graph, without scales of weights that are f32 now."""
    operands = rewriter.operands(node)
    if isinstance(node.op, EngramLookup):
        return operands
    return tuple(None if value is not None and value.type.dtype == DType.E8M0 else value for value in operands)


def _exact(op: Op) -> Op:
    if isinstance(op, MoeExperts):
        return replace(op, format="none")
    return replace(op, out="f32") if any(field.name == "out" for field in fields(op)) else op  # type: ignore[call-arg]
