"""Single-Pass mHC (DeepSeek-V4.1 report, section 2.4.1) across every sublayer boundary.

Before: `hc_update`, then `hc_coefficients`, `hc_mix`, `rms_norm` and `round_trip` of the new stream: five operations,
        (4N+4)·D values a token.
After:  one `mhc_boundary`, (2N+2)·D values; `mhc_enter` where the stream comes from no update.
Why:    the mix that collapses a stream was predicted one sublayer earlier, so nothing waits for a reduction over the
        new stream. Behind an Engram the boundary stays cut: its gate is a reduction over the updated stream, which must
        be complete before the next coefficients are predicted.
"""

from __future__ import annotations

from dataclasses import dataclass

from v41c.ir.graph import Graph, Module, Node, Origin, Value
from v41c.ir.op import Op
from v41c.ir.ops.hc_coefficients import HcCoefficients
from v41c.ir.ops.hc_mix import HcMix
from v41c.ir.ops.hc_update import HcUpdate
from v41c.ir.ops.mhc_boundary import MhcBoundary
from v41c.ir.ops.mhc_enter import MhcEnter
from v41c.ir.ops.rms_norm import RmsNorm
from v41c.ir.ops.round_trip import RoundTrip
from v41c.passes.context import PassContext

NAME = "fuse-mhc"


def run(module: Module, context: PassContext) -> Module:
    """Fuses in every graph; a graph without residual mixing is returned as it is."""
    return Module(tuple(_fuse(graph) for graph in module))


def _fuse(graph: Graph) -> Graph:
    users = graph.users
    order = {node: index for index, node in enumerate(graph.nodes)}
    gone: set[Node] = set()
    placed: dict[Node, Node] = {}
    for node in graph.nodes:
        boundary = _boundary(node, graph.producers, users) if isinstance(node.op, HcCoefficients) else None
        if boundary is not None:
            gone.update(boundary.parts)
            placed[min(boundary.parts, key=order.__getitem__)] = boundary.fused()
    if not placed:
        return graph
    nodes = [placed.get(node, node) for node in graph.nodes if node in placed or node not in gone]
    return graph.with_nodes(nodes)


@dataclass(frozen=True)
class _Boundary:
    """The operations of one boundary; `update` and `trip` may be missing."""

    update: Node | None
    coefficients: Node
    mix: Node
    norm: Node
    trip: Node | None

    @property
    def parts(self) -> list[Node]:
        """The operations that are there."""
        nodes = (self.update, self.coefficients, self.mix, self.norm, self.trip)
        return [node for node in nodes if node is not None]

    def fused(self) -> Node:
        """One node with the results of all of them, under their names."""
        inner, norm = self.coefficients.op, self.norm.op
        if not isinstance(inner, HcCoefficients) or not isinstance(norm, RmsNorm):
            raise TypeError("a boundary without coefficients or norm")
        format = self.trip.op.format if self.trip and isinstance(self.trip.op, RoundTrip) else "none"
        results = [*self.norm.results, *(self.trip.results if self.trip else ()), *self.coefficients.results]
        shared = (self.mix.operands[1], *self.coefficients.operands[1:], self.norm.operands[1])
        origin = Origin(self.norm.origin.module, NAME)
        if self.update is None:
            op: Op = MhcEnter(inner.norm_eps, inner.eps, inner.iterations, format)
            return Node(op, (self.coefficients.operands[0], *shared), tuple(results), origin)
        op = MhcBoundary(inner.norm_eps, inner.eps, inner.iterations, format)
        return Node(op, (*self.update.operands, *shared), (*self.update.results, *results), origin)


def _boundary(coefficients: Node, producers: dict[Value, Node], users: dict[Value, list[Node]]) -> _Boundary | None:
    """The boundary around a coefficient prediction, if its stream is mixed and normed for nobody else."""
    stream = coefficients.operands[0]
    if stream is None:
        return None
    mix = _only(users[stream], HcMix)
    norm = _only(users[mix.results[0]], RmsNorm) if mix is not None and len(users[mix.results[0]]) == 1 else None
    same_eps = (
        norm is not None and isinstance(norm.op, RmsNorm) and norm.op.eps == coefficients.op.attributes()["norm_eps"]
    )
    if mix is None or norm is None or not same_eps:
        return None
    producer = producers.get(stream)
    update = producer if producer is not None and isinstance(producer.op, HcUpdate) else None
    return _Boundary(update, coefficients, mix, norm, _only(users[norm.results[0]], RoundTrip))


def _only(nodes: list[Node], kind: type[Op]) -> Node | None:
    """The one node of a kind, None if there is none or several."""
    found = [node for node in nodes if isinstance(node.op, kind)]
    return found[0] if len(found) == 1 else None
