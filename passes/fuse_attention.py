"""Attention in five launches (DeepSeek-V4.1 report, section 2.3).

Before: norms, rotations and round trips of the query latent and of the window keys; rotation of the queries, attention,
        write of the ring, rotation back; projection of the head groups, round trip.
After:  `latents`, `attend` and `grouped_linear_quantized`, between the projections wq_b and wo_b; `latent_norms` where
        wq_a and wkv are merged with other projections, or with none.
Why:    every value in between is read once by one operation: it need not leave the cache that it was made in. The
        ring is written behind the attention that reads it, as its versions in the graph say. A draft block leaves its
        ring alone, so that its attention stays in parts.
"""

from __future__ import annotations

from collections.abc import Iterator

from v41c.ir.formats import FORMATS
from v41c.ir.graph import Graph, Module, Node, Value
from v41c.ir.op import Op
from v41c.ir.ops.attend import Attend
from v41c.ir.ops.attention import Attention
from v41c.ir.ops.grouped_linear import GroupedLinear
from v41c.ir.ops.grouped_linear_quantized import GroupedLinearQuantized
from v41c.ir.ops.latent_norms import LatentNorms
from v41c.ir.ops.latents import Latents
from v41c.ir.ops.linear import Linear
from v41c.ir.ops.linear_group import MOST, LinearGroup
from v41c.ir.ops.reshape import Reshape
from v41c.ir.ops.rms_norm import RmsNorm
from v41c.ir.ops.rope import Rope
from v41c.ir.ops.round_trip import RoundTrip
from v41c.ir.ops.window_write import WindowWrite
from v41c.ir.rewrite import Fusion, fuse, only_user
from v41c.passes.context import PassContext

NAME = "fuse-attention"


def run(module: Module, context: PassContext) -> Module:
    """Fuses in every graph what stands as the model writes it, and leaves the rest."""
    return Module(tuple(fuse(graph, _fusions(graph), NAME) for graph in module))


def _fusions(graph: Graph) -> Iterator[Fusion]:
    for node in graph.nodes:
        found: list[Fusion | None] = []
        if isinstance(node.op, Attention):
            found = [_latents(graph, node), _attend(graph, node)]
        elif isinstance(node.op, GroupedLinear):
            found = [_project(graph, node)]
        yield from (fusion for fusion in found if fusion is not None)


def _latents(graph: Graph, attention: Node) -> Fusion | None:
    """The norms of what attention's queries and window keys are made of."""
    keys_trip = _maker(graph, attention.operands[1], RoundTrip)
    rope = _maker(graph, keys_trip.operands[0] if keys_trip else attention.operands[1], Rope)
    norm = None if rope is None else _maker(graph, rope.operands[0], RmsNorm)
    rotated = _maker(graph, attention.operands[0], Rope)
    heads = None if rotated is None else _maker(graph, rotated.operands[0], Reshape)
    product = None if heads is None else _maker(graph, heads.operands[0], Linear, LinearGroup)
    if rope is None or norm is None or product is None:
        return None
    query_trip = _maker(graph, product.operands[0], RoundTrip)
    query = _maker(graph, query_trip.operands[0] if query_trip else product.operands[0], RmsNorm)
    if query is None or query.op != norm.op:
        return None
    inner = [norm.results[0], *(rope.results if keys_trip else ()), *(query.results if query_trip else ())]
    if any(len(graph.users[value]) > 1 or value in graph.outputs for value in inner):
        return None
    ends = (query_trip or query, keys_trip or rope)
    op = LatentNorms(norm.op.attributes()["eps"], _format(query_trip), _format(keys_trip))
    operands = (*query.operands, *norm.operands, *rope.operands[1:])
    parts = [part for part in (query, query_trip, norm, rope, keys_trip) if part is not None]
    results = tuple(end.results[0] for end in ends)
    return _with_products(graph, query, norm, op, rope.operands[1:], parts, results) or Fusion(
        tuple(parts), op, operands, results
    )


def _with_products(
    graph: Graph,
    query: Node,
    keys: Node,
    op: LatentNorms,
    tables: tuple[Value | None, ...],
    parts: list[Node],
    results: tuple[Value, ...],
) -> Fusion | None:
    """The norms with the products that they read, if these stand together, and alone, for nobody else."""
    product = _maker(graph, query.operands[0], LinearGroup)
    latents = (query.operands[0], keys.operands[0])
    if product is None or product.results != latents:
        return None
    if any(len(graph.users[value]) > 1 or value in graph.outputs for value in product.results):
        return None
    x, q_down, kv_down = product.operands[:3]
    scales = product.operands[1 + MOST : 3 + MOST]
    fused = Latents(str(product.op.attributes()["out"]), op.eps, op.q_format, op.kv_format)
    operands = (x, q_down, kv_down, query.operands[1], keys.operands[1], *tables, *scales)
    return Fusion((product, *parts), fused, operands, results)


def _attend(graph: Graph, attention: Node) -> Fusion | None:
    """Causal attention between its rotations, and the write of the ring that it reads."""
    q, kv, sink, window, positions, slots, *rest = attention.operands
    before = _maker(graph, q, Rope)
    after = only_user(graph, attention.results[0], Rope)
    if before is None or after is None or q is None or only_user(graph, q, Attention) is None or window is None:
        return None
    writes = [user for user in graph.users[window] if isinstance(user.op, WindowWrite)]
    same_tables = before.operands[1:] == after.operands[1:]
    if len(writes) != 1 or writes[0].operands[1:] != (kv, positions, slots) or not same_tables:
        return None
    if not attention.op.attributes()["causal"] or before.op != Rope(False) or after.op != Rope(True):
        return None
    operands = (before.operands[0], kv, sink, window, positions, slots, *rest[:2], *before.operands[1:], *rest[2:])
    op = Attend(attention.op.attributes()["scale"])
    return Fusion((attention, before, writes[0], after), op, operands, (*writes[0].results, *after.results))


def _project(graph: Graph, product: Node) -> Fusion | None:
    """The projection of head groups and the round trip behind it, whose groups must not straddle the heads'."""
    (result,), (x, weight, _) = product.results, product.operands
    trip = only_user(graph, result, RoundTrip)
    if trip is None or x is None or weight is None:
        return None
    rows = int(weight.type.shape[0]) // int(x.type.shape[1])
    if rows % FORMATS[_format(trip)].group:
        return None
    return Fusion((product, trip), GroupedLinearQuantized(_format(trip)), product.operands, trip.results)


def _format(trip: Node | None) -> str:
    return "none" if trip is None else str(trip.op.attributes()["format"])


def _maker(graph: Graph, value: Value | None, *kinds: type[Op]) -> Node | None:
    """The operation that makes a value, if it is of one of the kinds."""
    node = None if value is None else graph.producers.get(value)
    return node if node is not None and isinstance(node.op, kinds) else None
