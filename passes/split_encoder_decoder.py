"""The causal encoder-decoder cut (DeepSeek-V4.1 report, section 2.3): two graphs instead of one.

Before: one graph `model`.
After:  `encoder`, every layer before the last KV source plus that source's compressor and index keys, and `decoder`,
        the rest. The encoder ends with the stream and mix that enter the decoder.
Why:    of all prompt tokens but the last few, the decoder's first layer needs only its global rows. They depend on the
        encoder's output alone, which this pass proves, so prefill runs the decoder over a bounded tail.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from v41c.errors import VerifyError
from v41c.ir.graph import Graph, Module, Node, Value
from v41c.ir.ops.attention import Attention
from v41c.ir.ops.cache_write import CacheWrite
from v41c.ir.ops.compress_pool import CompressPool
from v41c.ir.rewrite import closure
from v41c.passes.context import PassContext

NAME = "split-encoder-decoder"


def run(module: Module, context: PassContext) -> Module:
    """Cuts the graph `model` in two, if there is one; a model without KV sources is cut after its embedding."""
    graphs: list[Graph] = []
    for graph in module:
        graphs.extend(_Cut(graph).run() if graph.name == "model" else (graph,))
    return Module(tuple(graphs))


class _Cut:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.producers = graph.producers
        self.order = {node: index for index, node in enumerate(graph.nodes)}
        self.layer = self._last_source()
        self.begin = self._layer_begin()

    def run(self) -> tuple[Graph, Graph]:
        """The encoder and the decoder."""
        before = set(self.graph.nodes[: self.begin])
        moved = self._moved(before)
        encoder = before | moved
        rest = [node for node in self.graph.nodes if node not in encoder]
        from_inputs = self._from_inputs(encoder)
        cut = self._cut_values(rest, encoder, moved, from_inputs)
        states = self.graph.state_versions
        again = closure(rest, self.producers, lambda value: value in cut or value in states) - set(rest)
        decoder = [node for node in self.graph.nodes if node in again or node in set(rest)]
        decoder = [node for node in decoder if not (node in encoder and node.op.states)]
        crossing = self._ordered(cut)
        return (
            self._graph("encoder", [n for n in self.graph.nodes if n in encoder], self.graph.inputs, crossing),
            self._decoder(decoder, crossing),
        )

    def _last_source(self) -> str:
        """Module path `layers.N` of the last layer that writes global rows; `layers.0` without any."""
        sources = [node.origin.module for node in self.graph.nodes if isinstance(node.op, CacheWrite)]
        return ".".join(sources[-1].split(".")[:2]) if sources else "layers.0"

    def _layer_begin(self) -> int:
        """Index of the first node of the decoder's first layer."""
        for index, node in enumerate(self.graph.nodes):
            if node.origin.module == self.layer or node.origin.module.startswith(f"{self.layer}."):
                return index
        raise VerifyError(f"{NAME}: expected an operation of {self.layer}, found none")

    def _moved(self, before: set[Node]) -> set[Node]:
        """Nodes after the cut that go to the encoder: global writes, and writes to states only the encoder reads."""
        users: dict[str, list[Node]] = {}
        for node in self.graph.nodes:
            for value in node.operands:
                if value is not None and value in self.graph.state_versions:
                    users.setdefault(self.graph.state_versions[value], []).append(node)
        roots = []
        for node in self.graph.nodes[self.begin :]:
            if not node.op.states:
                continue
            states = [self.graph.state_versions[old] for old, _ in node.consumed]
            others = [user for state in states for user in users[state] if user is not node]
            private = bool(others) and all(user in before for user in others)
            if isinstance(node.op, CacheWrite | CompressPool) or private:
                roots.append(node)
        moved = closure(roots, self.producers, lambda value: self.producers[value] in before)
        for node in moved:
            if isinstance(node.op, Attention) or (node.op.states and node not in roots):
                raise VerifyError(
                    f"{NAME}: {node.origin.module}: global rows of {self.layer} depend on {node.op.name()}: "
                    "expected them to depend on the encoder's output only"
                )
        return moved

    def _from_inputs(self, encoder: set[Node]) -> set[Node]:
        """Encoder nodes that depend on the step's inputs alone, cheap to repeat: no weights, no states."""
        found: set[Node] = set()
        heavy = set(self.graph.weights) | set(self.graph.state_versions)
        for node in self.graph.nodes:
            operands = [value for value in node.operands if value is not None]
            plain = all(value in self.graph.inputs or self.producers.get(value) in found for value in operands)
            if node in encoder and plain and not heavy.intersection(operands):
                found.add(node)
        return found

    def _cut_values(self, rest: list[Node], encoder: set[Node], moved: set[Node], from_inputs: set[Node]) -> set[Value]:
        """Encoder values that the decoder receives; what lies behind them it does not repeat."""
        states = self.graph.state_versions
        cut: set[Value] = set()
        pending = list(rest)
        seen: set[Node] = set(rest)
        while pending:
            for value in pending.pop().operands:
                producer = None if value is None else self.producers.get(value)
                if value is None or producer is None or producer not in encoder or value in states:
                    continue
                if producer in from_inputs or producer in moved:
                    if producer not in seen:
                        seen.add(producer)
                        pending.append(producer)
                else:
                    cut.add(value)
        return cut | {value for value in self.graph.outputs if self.producers.get(value) in encoder}

    def _ordered(self, cut: Iterable[Value]) -> tuple[Value, ...]:
        return tuple(sorted(cut, key=lambda value: self.order[self.producers[value]]))

    def _graph(self, name: str, nodes: list[Node], inputs: tuple[Value, ...], outputs: tuple[Value, ...]) -> Graph:
        used = {value for node in nodes for value in node.operands if value is not None} | set(outputs)
        states = {state.name: state for state in self.graph.states}
        finals = dict(states)
        for node in nodes:
            for old, new in node.consumed:
                finals[self.graph.state_versions[old]] = new
        graph = replace(
            self.graph,
            name=name,
            inputs=tuple(value for value in inputs if value in used),
            outputs=outputs,
            finals=finals,
        )
        return graph.with_nodes(nodes)

    def _decoder(self, nodes: list[Node], crossing: tuple[Value, ...]) -> Graph:
        """The decoder's nodes, reading the states that the encoder wrote as they stand at its start."""
        written = {value for node in nodes for value in node.results}
        first = {state.name: state for state in self.graph.states}
        renamed: list[Node] = []
        for node in nodes:
            operands = tuple(
                first[self.graph.state_versions[value]]
                if value is not None and value in self.graph.state_versions and value not in written
                else value
                for value in node.operands
            )
            renamed.append(node if operands == node.operands else replace(node, operands=operands))
        return self._graph("decoder", renamed, self.graph.inputs + crossing, self.graph.outputs)


def why_not_ced(decoder: Graph) -> str:
    """Why the bounded decoder replay cannot be used, empty if it can."""
    for node in decoder.nodes:
        if node.op.name() == "engram_hash":
            layer = node.origin.module.removesuffix(".engram")
            return f"{layer} has an Engram and stands in the decoder, which then needs every token"
    return ""
