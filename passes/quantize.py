"""The release's formats for weights that a checkpoint stores as bf16. Off unless asked for: `--passes +quantize`.

Before: bf16 weights of dense projections, routed experts and Engram tables, read by operations without scales.
After:  fp8 and fp4 weights with their scales, and the `round_trip` of every input that meets such a weight, where the
        trace of a checkpoint in release formats has them. The weights are made when the engine is written.
Why:    a decode step waits for its weights, and fp8 is half, fp4 a quarter of bf16. What a checkpoint stores in these
        formats is left alone: a module without a bf16 weight to quantise is returned as it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from v41c.ir.graph import Graph, Module, Node, Origin, Value
from v41c.ir.op import Op
from v41c.ir.ops.linear import Linear
from v41c.ir.ops.moe_experts import MoeExperts
from v41c.ir.ops.round_trip import RoundTrip
from v41c.ir.rewrite import Rewriter
from v41c.ir.types import DType, TensorType
from v41c.passes.context import Numbers, PassContext

NAME = "quantize"
NUMBERS = Numbers("weights, and the inputs that meet them, are rounded to the release's formats")
#: format of the inputs that meet quantised weights; a grouped projection and a table take theirs as they are
ACTIVATION = RoundTrip("fp8_e8m0_32")
_ROUNDED = (Linear, MoeExperts)


def run(module: Module, context: PassContext) -> Module:
    """Quantises the bf16 weights that `context.quantized` has a type for."""
    graphs = tuple(_Quantizer(graph, context.quantized).run() for graph in module)
    return module if all(new is old for new, old in zip(graphs, module, strict=True)) else Module(graphs)


class _Quantizer:
    def __init__(self, graph: Graph, types: Mapping[str, TensorType]) -> None:
        self.graph = graph
        self.rewriter = Rewriter(NAME)
        #: bf16 weight -> the quantised one and its scale
        self.weights: dict[Value | None, tuple[Value, Value]] = {}
        for weight in graph.weights:
            if weight.type.dtype == DType.BF16 and weight.name in types:
                scale = weight.name.removesuffix("weight") + "scale"
                self.weights[weight] = Value(weight.name, types[weight.name]), Value(scale, types[scale])
        #: value of the new graph -> its round trip
        self.rounded: dict[Value, Value] = {}
        self.modules = {node.origin.module for node in graph.nodes}
        self.round_trips: Counter[str] = Counter()

    def run(self) -> Graph:
        """The graph, the same object when it reads no weight to quantise."""
        if not self.weights:
            return self.graph
        self.rewriter.replacements |= {old: new for old, (new, _) in self.weights.items() if old is not None}
        for node in self.graph.nodes:
            if isinstance(node.op, RoundTrip):
                self._keep_round_trip(node)
            elif any(operand in self.weights for operand in node.operands):
                self._quantize(node)
            else:
                self.rewriter.keep(node)
        stored = [value for old in self.graph.weights for value in self.weights.get(old, (old,))]
        return self.rewriter.finish(replace(self.graph, weights=tuple(stored)))

    def _quantize(self, node: Node) -> None:
        """The operation with quantised weights, their scales, and its input rounded."""
        operands = dict(
            zip((operand.name for operand in node.op.operands()), self.rewriter.operands(node), strict=True)
        )
        for name, old in zip(tuple(operands), node.operands, strict=True):
            if old in self.weights:
                operands[f"{name}_scale" if f"{name}_scale" in operands else "scale"] = self.weights[old][1]
        op: Op = node.op
        if isinstance(op, _ROUNDED):
            holder = next(old.name for old in node.operands if old is not None and old in self.weights)
            operands["x"] = self._round(operands["x"], holder)
        if isinstance(op, MoeExperts):
            op = replace(op, format=ACTIVATION.format)
        self.rewriter.put(node, op, *operands.values())

    def _round(self, x: Value | None, weight: str) -> Value | None:
        """The round trip of an input, made once, in the module that calls the holder of `weight`."""
        if x is None or x in self.rounded:
            return x if x is None else self.rounded[x]
        module = weight.rpartition(".")[0].rpartition(".")[0]
        while module and module not in self.modules:
            module = module.rpartition(".")[0]
        result = Value(self._name(module), x.type)
        self.rewriter.nodes.append(Node(ACTIVATION, (x,), (result,), Origin(module, NAME)))
        self.rounded[x] = result
        return result

    def _keep_round_trip(self, node: Node) -> None:
        """A round trip of the model's own, under the number that it has among those of its module now."""
        (old,), (x,) = node.results, self.rewriter.operands(node)
        stem = _stem(node.origin.module)
        numbered = old.name == stem or old.name.startswith(f"{stem}.")
        new = Value(self._name(node.origin.module) if numbered else old.name, old.type)
        if new.name == old.name:
            self.rewriter.keep(node)
            new = old
        else:
            self.rewriter.replacements[old] = new
            self.rewriter.nodes.append(replace(node, operands=(x,), results=(new,)))
        if node.op == ACTIVATION and x is not None:
            self.rounded[x] = new

    def _name(self, module: str) -> str:
        """Round trips of a module are numbered in their order, from the second on."""
        self.round_trips[module] += 1
        count = self.round_trips[module]
        return _stem(module) + (f".{count}" if count > 1 else "")


def _stem(module: str) -> str:
    return f"{module}.{RoundTrip.name()}" if module else RoundTrip.name()
