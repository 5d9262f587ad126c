"""Figures of a model's architecture, each computed from its graphs.

Parameters are counted on the unfused graphs, sizes on the graphs as an engine keeps them: no figure is typed in, and no
field of a configuration is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from v41c.boundary import boundaries
from v41c.ir.graph import Graph, Node, Value
from v41c.ir.types import DType, TensorType
from v41c.layers import Layer, layer_of, layer_plan, state_types
from v41c.passes.split_encoder_decoder import why_not_ced
from v41c.stages import Stages, chosen_graphs, is_backbone

#: the contexts between which decode arithmetic grows; at the long one positions of a reindexing query are counted
SHORT_CONTEXT, LONG_CONTEXT = 4096, 1 << 20
#: element types of parameters; e8m0 are scales and integers are derived tables
PARAMETERS = (DType.F32, DType.BF16, DType.F8E4M3, DType.F4E2M1)

Number = int | float


@dataclass(frozen=True)
class Figure:
    """A figure: its JSON key, what it is in words, its value and unit, and where in the graphs it comes from."""

    key: str
    title: str
    value: Number
    unit: str
    source: str


def figures(stages: Stages, context: int) -> tuple[Figure, ...]:
    """Every figure of a model, for prompts of `context` tokens."""
    subject = _Subject(stages, context)
    return tuple(figure(subject) for figure in _FIGURES)


class _Subject:
    """A model under report: its unfused graphs, the plan of its layers, and the graphs that an engine keeps."""

    def __init__(self, stages: Stages, context: int) -> None:
        self.context = context
        self.halves = stages.halves
        self.stored = stages.last
        self.plan = layer_plan(stages.halves)

    @cached_property
    def backbone(self) -> tuple[Layer, ...]:
        return tuple(layer for layer in self.plan if layer.part != "draft")

    @cached_property
    def states(self) -> dict[str, TensorType]:
        return state_types(self.stored)

    @cached_property
    def dims(self) -> dict[str, int]:
        return token_dims(self.states, self.context)

    def nodes(self, *ops: str) -> Iterator[tuple[Graph, Node]]:
        """Operations of the backbone by name, unfused."""
        for graph in self.halves:
            if is_backbone(graph):
                yield from ((graph, node) for node in graph.nodes if node.op.name() in ops)

    def row_bytes(self, state: str) -> Fraction:
        """Bytes a token adds to a global state: dimension C{r} grows by a row every r tokens."""
        type = self.states[state]
        ratios = [int(dim[1:]) for dim in type.symbols if dim.startswith("C")]
        row = TensorType(type.dtype, tuple(1 if isinstance(dim, str) else dim for dim in type.shape)).size_bytes
        return Fraction(row, ratios[0]) if ratios else Fraction(0)

    def stored_bytes(self, prefixes: set[str]) -> tuple[int, int]:
        """Bytes and number of the backbone's weights under checkpoint prefixes, scales included."""
        found = {
            weight.name: weight.type.size_bytes
            for graph in self.stored
            if is_backbone(graph)
            for weight in graph.weights
            if _prefix(weight) in prefixes
        }
        return sum(found.values()), len(found)


def token_dims(states: Mapping[str, TensorType], context: int) -> dict[str, int]:
    """Dimensions of one decoded token at a context."""
    symbols = {dim for type in states.values() for dim in type.symbols if dim.startswith("C")}
    return {"T": 1, "R": 1, "S": 1} | {dim: max(1, context // int(dim[1:])) for dim in symbols}


def _prefix(weight: Value) -> str:
    """What a weight belongs to: all experts of a layer, or the module in front of its last name."""
    stack, is_stack, _ = weight.name.partition("{}")
    return stack if is_stack else weight.name.rpartition(".")[0]


def _number(value: Fraction) -> Number:
    return int(value) if value.denominator == 1 else float(value)


def _tables(subject: _Subject) -> dict[str, Value]:
    """Engram tables by name."""
    tables = (node.operand("table") for _, node in subject.nodes("engram_lookup"))
    return {table.name: table for table in tables if table is not None}


def backbone_parameters(subject: _Subject) -> Figure:
    """Embedding, layers and head; no scales, Engram tables or draft head."""
    tables = _tables(subject)
    weights = {
        weight.name: weight.type.elements
        for graph in subject.halves
        if is_backbone(graph)
        for weight in graph.weights
        if weight.type.dtype in PARAMETERS and weight.name not in tables
    }
    graphs = " and ".join(graph.name for graph in subject.halves if is_backbone(graph))
    source = f"elements of the {len(weights)} weights of {graphs}, scales and Engram tables left out"
    return Figure("backbone_parameters", "parameters of the backbone", sum(weights.values()), "", source)


def engram_parameters(subject: _Subject) -> Figure:
    """Elements of the Engram tables."""
    types = {name: table.type for name, table in _tables(subject).items()}
    listed = ", ".join(f"{name} {type}" for name, type in types.items())
    total = sum(type.elements for type in types.values())
    source = f"tables of engram_lookup: {listed}" if types else "no operation engram_lookup"
    return Figure("engram_parameters", "parameters of the Engram tables", total, "", source)


def _active(subject: _Subject, names: tuple[str, ...]) -> dict[str, int]:
    """Elements of each weight that one token reads in graphs: of tables and expert stacks, only what it touches."""
    read: dict[str, int] = {}
    for graph in subject.halves:
        for node in graph.nodes if graph.name in names else ():
            types = tuple(None if value is None else value.type.bind(subject.dims) for value in node.operands)
            touched = node.op.touched(*types)
            for declared, role, value in zip(node.op.operands(), graph.roles(node), node.operands, strict=True):
                if value is not None and role == "weight" and value.type.dtype in PARAMETERS:
                    size = touched.get(declared.name, value.type.size_bytes)
                    read[value.name] = max(read.get(value.name, 0), size * 8 // value.type.dtype.bits)
    return read


def active_parameters_encoder(subject: _Subject) -> Figure:
    """Parameters one token reads in the encoder: a row of each table, the experts it visits."""
    read = _active(subject, ("encoder",))
    source = (
        f"what one token touches of {len(read)} weights of encoder: rows of tables, visited experts, the rest whole"
    )
    return Figure("active_parameters_encoder", "active parameters, encoder", sum(read.values()), "a token", source)


def active_parameters_total(subject: _Subject) -> Figure:
    """Parameters one token reads in encoder and decoder, head included."""
    read = _active(subject, ("encoder", "decoder"))
    source = f"the same over encoder and decoder, head included: {len(read)} weights"
    return Figure("active_parameters_total", "active parameters, all", sum(read.values()), "a token", source)


def global_state(subject: _Subject) -> Figure:
    """Bytes that a token adds to the global caches."""
    rows = {name: subject.row_bytes(name) for name in subject.states}
    grown = {name: size for name, size in rows.items() if size}
    source = "rows of " + ", ".join(f"{name} ({float(size):g})" for name, size in grown.items())
    total = _number(sum(grown.values(), Fraction(0)))
    return Figure(
        "global_state_bytes_per_token", "global state", total, "bytes a token", source if grown else "no such state"
    )


def global_state_unshared(subject: _Subject) -> Figure:
    """The same if every layer that reads global rows had its own rows and keys."""
    readers = [layer for layer in subject.backbone if layer.rows is not None]
    states = [state for layer in readers for state in (layer.rows, layer.keys) if state is not None]
    total = sum((subject.row_bytes(state) for state in states), Fraction(0))
    source = f"{len(readers)} attentions read global rows: rows and keys of each one's source, counted for each"
    return Figure(
        "global_state_bytes_per_token_unshared",
        "global state without sharing",
        _number(total),
        "bytes a token",
        source,
    )


def window_state(subject: _Subject) -> Figure:
    """Window caches of the backbone for one sequence."""
    types = [subject.states[layer.window] for layer in subject.backbone]
    total = sum(type.bind({"S": 1}).size_bytes for type in types)
    shapes = ", ".join(f"{sum(t == type for t in types)} × {type}" for type in dict.fromkeys(types))
    return Figure(
        "window_state_bytes", "window state", total, "bytes a sequence", f"windows of the attentions: {shapes}"
    )


def boundary_unfused(subject: _Subject) -> Figure:
    """Values of width d that the operations at a sublayer boundary read and write one by one, a token."""
    found = boundaries(subject.halves)
    moved = found[0].moved() if found else {}
    listed = ", ".join(f"{name} {count}" for name, count in moved.items())
    return Figure(
        "boundary_values_unfused_per_d",
        "residual traffic of a boundary",
        sum(moved.values()),
        "d values a token",
        f"operands and results of width d at {len(found)} boundaries: {listed}" if found else "no boundary",
    )


def boundary_fused(subject: _Subject) -> Figure:
    """The same of the one operation that stands for them."""
    found = boundaries(subject.halves)
    source = "operands and results of mhc_boundary at their types: stream and y, the next stream and u"
    converted = next((boundary for boundary in found if boundary.trip is not None), None)
    if converted is not None:
        source += f"; {converted.fused_converted} for {converted.moved_converted} with a converted u beside it"
    return Figure(
        "boundary_values_fused_per_d",
        "the same in one pass",
        found[0].fused if found else 0,
        "d values a token",
        source if found else "no boundary",
    )


def expert_bytes(subject: _Subject) -> Figure:
    """Routed experts of the backbone as the engine keeps them, scales included."""
    found = [(graph, node, node.operand("w1")) for graph, node in subject.nodes("moe_experts")]
    experts = sum(int(w1.type.shape[0]) for _, _, w1 in found if w1 is not None)
    prefixes = {
        _prefix(value)
        for graph, node, _ in found
        for role, value in zip(graph.roles(node), node.operands, strict=True)
        if role == "weight" and value is not None
    }
    size, count = subject.stored_bytes(prefixes)
    source = f"{count} weights of moe_experts, scales included, for {experts} experts"
    return Figure("expert_bytes", "routed experts", size, "bytes", source)


def engram_bytes(subject: _Subject) -> Figure:
    """Engram tables as the engine keeps them, scales included."""
    tables = _tables(subject).values()
    size, count = subject.stored_bytes({_prefix(table) for table in tables})
    rows = sum(int(table.type.shape[0]) for table in tables)
    each = f", {size / rows:g} bytes a row" if rows else ""
    return Figure(
        "engram_bytes", "Engram tables", size, "bytes", f"{count} weights of engram_lookup: {rows} rows{each}"
    )


def prefill_block_tokens(subject: _Subject) -> Figure:
    """Block-token evaluations of a prompt: the encoder over all of it, the decoder over a replay of one window."""
    encoder, decoder = (_blocks(subject, part) for part in ("encoder", "decoder"))
    reason = why_not_ced(subject.halves["decoder"])
    windows = [int(subject.states[layer.window].shape[1]) for layer in subject.backbone]
    tail = subject.context if reason else min(subject.context, max(windows, default=0))
    source = f"{encoder} attentions in encoder × {subject.context} + {decoder} in decoder × {tail}"
    return Figure(
        "prefill_block_tokens",
        "prefill",
        encoder * subject.context + decoder * tail,
        "blocks × tokens",
        f"{source}: {reason}" if reason else source,
    )


def prefill_block_tokens_full(subject: _Subject) -> Figure:
    """The same with the decoder over all of it."""
    blocks = _blocks(subject, "encoder") + _blocks(subject, "decoder")
    source = f"{blocks} attentions × {subject.context}"
    return Figure("prefill_block_tokens_full", "prefill in full", blocks * subject.context, "blocks × tokens", source)


def _blocks(subject: _Subject, part: str) -> int:
    return sum(layer.part == part for layer in subject.plan)


def reindex_positions(subject: _Subject) -> Figure:
    """Most index positions that a query of a reindexing layer scores, at a million tokens of context."""
    dims = token_dims(subject.states, LONG_CONTEXT)
    reindexing = {layer.name for layer in subject.backbone if layer.mode == "reindex"}
    scored: dict[str, int] = {}
    for _, node in subject.nodes("index_topk"):
        layer, keys, pool = layer_of(node.origin.module), node.operand("keys"), node.operand("pool")
        if layer in reindexing and keys is not None:
            stored = int(keys.type.bind(dims).shape[1])
            block = int(node.op.attributes()["block"])
            scored[layer] = stored if pool is None else min(stored, int(pool.type.shape[1]) * block)
    source = f"index_topk over its candidates' blocks × block, or all its keys: {', '.join(scored)}"
    return Figure(
        "reindex_positions_per_query",
        "index positions of a reindexing layer",
        max(scored.values(), default=0),
        f"a query at {LONG_CONTEXT:,} tokens",
        source if scored else "no layer selects again from another's keys",
    )


def decode_growth(subject: _Subject) -> Figure:
    """Arithmetic of a decoded token at a long context over that at a short one, fp4 by fp4 products at half."""
    short, long = (_decode_flops(subject, context) for context in (SHORT_CONTEXT, LONG_CONTEXT))
    source = (
        f"cost of a token's operations, {short[0] / 1e9:.4g} G at {SHORT_CONTEXT} and {long[0] / 1e9:.4g} G at "
        f"{LONG_CONTEXT} tokens; fp4 by fp4 products (index scores) count half, {long[1] / short[1]:.3f} if they do not"
    )
    return Figure(
        "decode_arithmetic_growth",
        "decode arithmetic, long over short context",
        long[0] / short[0],
        "times",
        source,
    )


def _decode_flops(subject: _Subject, context: int) -> tuple[float, float]:
    """Operations of a decoded token with fp4 by fp4 products counted half, and with all products counted alike."""
    dims = token_dims(subject.states, context)
    halved, alike = 0.0, 0.0
    for graph in filter(is_backbone, chosen_graphs(subject.stored, "fewest").values()):
        for node in graph.nodes:
            flops = graph.node_cost(node, dims).flops
            alike += flops
            halved += flops / 2 if _scores_packed_keys(node) else flops
    return halved, alike


def _scores_packed_keys(node: Node) -> bool:
    """Whether the operation multiplies fp4 queries with a packed cache of fp4 keys."""
    if not any(declared.name == "keys" for declared in node.op.operands()):
        return False
    keys = node.operand("keys")
    return keys is not None and keys.type.dtype == DType.U8


def _launches(subject: _Subject, key: str, title: str, tokens: str) -> Figure:
    reusing = [layer.name for layer in subject.backbone if layer.mode == "reuse"]
    counts = dict.fromkeys(reusing, 0)
    for graph in chosen_graphs(subject.stored, tokens).values():
        for node in graph.nodes:
            layer = layer_of(node.origin.module)
            if layer in counts:
                counts[layer] += graph.node_cost(node, subject.dims).launches
    spread = f"{min(counts.values())} to {max(counts.values())}" if counts else ""
    source = f"operations but views in the last graphs, {spread} in {len(counts)} layers of mode reuse"
    return Figure(key, title, max(counts.values(), default=0), "", source if counts else "no layer of mode reuse")


def launches_decode(subject: _Subject) -> Figure:
    """Launches of a reuse-mode layer for one token."""
    return _launches(subject, "launches_per_reuse_layer_decode", "launches of a reuse-mode layer, decode", "fewest")


def launches_prefill(subject: _Subject) -> Figure:
    """Launches of a reuse-mode layer for a chunk of a prompt."""
    return _launches(subject, "launches_per_reuse_layer_prefill", "launches of a reuse-mode layer, prefill", "most")


_FIGURES: tuple[Callable[[_Subject], Figure], ...] = (
    backbone_parameters,
    engram_parameters,
    active_parameters_encoder,
    active_parameters_total,
    global_state,
    global_state_unshared,
    window_state,
    boundary_unfused,
    boundary_fused,
    expert_bytes,
    engram_bytes,
    prefill_block_tokens,
    prefill_block_tokens_full,
    reindex_positions,
    decode_growth,
    launches_decode,
    launches_prefill,
)
