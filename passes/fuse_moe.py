"""A mixture of experts in two launches (DeepSeek-V4.1 release).

Before: router product, choice; routed experts; the shared expert's two products, activation, round trip and last
        product; their sum.
After:  `gate` and `moe_layer`.
Why:    logits, activations and the routed sum never leave the operation that makes them, and a single token forks
        twice for all experts instead of five times. A shared expert in a format of another kind than the routed ones
        (scaled or not) stays apart, since both share the outputs out among threads alike.
"""

from __future__ import annotations

from collections.abc import Iterator

from v41c.ir.graph import Graph, Module, Node, Value
from v41c.ir.op import FLOATS, Op
from v41c.ir.ops.add import Add
from v41c.ir.ops.gate import Gate
from v41c.ir.ops.linear import Linear
from v41c.ir.ops.moe_experts import MoeExperts
from v41c.ir.ops.moe_layer import MoeLayer
from v41c.ir.ops.round_trip import RoundTrip
from v41c.ir.ops.route import Route
from v41c.ir.ops.swiglu import Swiglu
from v41c.ir.rewrite import Fusion, fuse, only_user
from v41c.passes.context import PassContext

NAME = "fuse-moe"


def run(module: Module, context: PassContext) -> Module:
    """Fuses in every graph what stands as the model writes it, and leaves the rest."""
    return Module(tuple(fuse(graph, _fusions(graph), NAME) for graph in module))


def _fusions(graph: Graph) -> Iterator[Fusion]:
    for node in graph.nodes:
        found: Fusion | None = None
        if isinstance(node.op, Route):
            found = _gate(graph, node)
        elif isinstance(node.op, Add):
            found = _layer(graph, node)
        if found is not None:
            yield found


def _gate(graph: Graph, route: Node) -> Fusion | None:
    """The router's product and the choice."""
    product = _maker(graph, route.operands[0], Linear)
    if product is None or product.operands[2] is not None:
        return None
    operands = (*product.operands[:2], *route.operands[1:])
    return Fusion((route, product), Gate(**route.op.attributes()), operands, route.results)


def _layer(graph: Graph, total: Node) -> Fusion | None:
    """Routed experts, shared expert and their sum."""
    routed, last = _maker(graph, total.operands[0], MoeExperts), _maker(graph, total.operands[1], Linear)
    if routed is None or last is None:
        return None
    trip = _maker(graph, last.operands[0], RoundTrip)
    activation = _maker(graph, trip.operands[0] if trip else last.operands[0], Swiglu)
    if activation is None:
        return None
    gate, up = (_maker(graph, value, Linear) for value in activation.operands)
    if gate is None or up is None or gate.operands[0] is not up.operands[0]:
        return None
    limit, out = routed.op.attributes()["limit"], total.op.attributes()["out"]
    products = (gate, up, last)
    alike = activation.op == Swiglu(limit) and all(product.op == Linear(out) for product in products)
    if not alike or _scaled(routed.operands[3]) != _scaled(gate.operands[1]):
        return None
    shared_format = str(trip.op.attributes()["format"]) if trip else "none"
    op = MoeLayer(limit, routed.op.attributes()["format"], shared_format, out)
    weights, scales = (tuple(product.operands[i] for product in products) for i in (1, 2))
    operands = (*routed.operands[:6], gate.operands[0], *weights, *routed.operands[6:], *scales)
    parts = [total, routed, gate, up, activation, *([trip] if trip else []), last]
    return Fusion(tuple(parts), op, operands, total.results)


def _scaled(weight: Value | None) -> bool:
    return weight is not None and weight.type.dtype not in FLOATS


def _maker(graph: Graph, value: Value | None, kind: type[Op]) -> Node | None:
    """The operation of a kind that makes a value for one reader alone."""
    node = None if value is None else graph.producers.get(value)
    if node is None or value is None or not isinstance(node.op, kind):
        return None
    return node if only_user(graph, value, Op) is not None else None
