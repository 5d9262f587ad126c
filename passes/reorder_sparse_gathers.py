"""Sparse reads in an order that memory and disks like (DeepSeek-V4.1 report, sections 2.2 and 2.3).

Before: each Engram looks its rows up where it needs them, in the order of the tokens; every layer that attends to the
        same selected rows dequantises them for itself.
After:  the rows of every Engram are known, sorted and asked for before the first layer, and read in their order: right
        then, aside, where the target has kernels run beside others, else where they are needed; selected rows are
        gathered once where that is cheaper, and the layers attend to them there.
Why:    which rows an Engram needs follows from token ids alone, which this pass proves: a table on disk or, of a GPU,
        in the host's memory is then read while layers run, front to back, equal rows once. Gathering pays for one token
        and several layers; for many tokens the rows would leave the cache before they are read. Each variant of a graph
        is decided for itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import replace
from functools import partial

from v41c.errors import UnsupportedError
from v41c.ir.graph import Graph, Module, Node, Origin, Value
from v41c.ir.op import Op
from v41c.ir.ops.attend import Attend
from v41c.ir.ops.attend_gathered import AttendGathered
from v41c.ir.ops.engram_lookup import EngramLookup
from v41c.ir.ops.engram_lookup_ordered import EngramLookupOrdered
from v41c.ir.ops.gather_selected import GatherSelected
from v41c.ir.ops.sort_rows import SortRows
from v41c.ir.rewrite import Rewriter, closure
from v41c.ir.types import DType
from v41c.passes.context import PassContext
from v41c.passes.select_kernels import select

NAME = "reorder-sparse-gathers"
#: elements between gathered rows, so that rows a power of two long do not share sets of a cache
PADDING = 16
_INTEGERS = (DType.I32, DType.I64, DType.BOOL)


def run(module: Module, context: PassContext) -> Module:
    """Works on graphs whose kernels are selected, and selects those of the operations that it makes."""
    known = known_from_tokens(module)
    graphs = []
    for graph in module:
        for rewrite in (partial(_read_in_order, known), _gather_once):
            # a target without kernels for what a rewrite makes keeps what it has
            with contextlib.suppress(UnsupportedError):
                graph = rewrite(graph, context)
        graphs.append(graph)
    return Module(tuple(graphs))


# ---- Engram rows -----------------------------------------------------------------------------------------------------


def known_from_tokens(module: Module) -> set[Value]:
    """Values that no layer's output reaches: integers, made of integers alone all the way from a step's inputs.

    What a layer computes is made of numbers that are no integers. A state counts if all that any graph writes to it
    does, and an input that is another graph's output if that output does.
    """
    reached: set[str] = set()  # names of states, and of values between graphs, that a layer's output reaches
    while True:
        known: set[Value] = set()
        found = set(reached)
        for graph in module:
            given = (*graph.inputs, *graph.weights, *graph.states)
            good = {value for value in given if value.type.dtype in _INTEGERS and value.name not in reached}
            for node in graph.nodes:
                if all(value is None or value in good for value in node.operands):
                    good.update(result for result in node.results if result.type.dtype in _INTEGERS)
            found.update(name for name, value in graph.finals.items() if value not in good)
            found.update(value.name for value in graph.outputs if value not in good)
            known |= good
        if found == reached:
            return known
        reached = found


def _read_in_order(known: set[Value], graph: Graph, context: PassContext) -> Graph:
    lookups = [node for node in graph.nodes if isinstance(node.op, EngramLookup) and _is_unordered(node, graph, known)]
    if not lookups:
        return graph
    roots = [graph.producers[rows] for node in lookups if (rows := node.operand("rows")) in graph.producers]
    first = closure(roots, graph.producers, lambda value: False)
    rewriter = Rewriter(NAME)
    for node in graph.nodes:
        if node in first:
            rewriter.keep(node)
    aside = context.machine is not None and context.machine.runs_aside
    sorted_rows: dict[Node, tuple[Value, ...]] = {}
    for node in lookups:
        made = _sort(node, graph, context)
        rewriter.nodes.append(made)
        if aside:
            _look_up(rewriter, node, made.results, graph, context)
            rewriter.nodes[-1] = _aside(rewriter.nodes[-1])
        sorted_rows[node] = made.results
    for node in graph.nodes:
        if node not in first and node not in sorted_rows:
            rewriter.keep(node)
        elif node in sorted_rows and not aside:
            _look_up(rewriter, node, sorted_rows[node], graph, context)
    return rewriter.finish(graph)


def _look_up(
    rewriter: Rewriter, node: Node, sorted_rows: tuple[Value, ...], graph: Graph, context: PassContext
) -> None:
    """A lookup of rows in order in the place of one that has them as they come, with its kernel."""
    ordered, places = sorted_rows
    _, table, scale = node.operands
    if _order_is_free(graph, node):
        rewriter.put(node, node.op, ordered, table, scale)
    else:
        rewriter.put(node, EngramLookupOrdered(**node.op.attributes()), ordered, places, table, scale)
    rewriter.nodes[-1] = select(rewriter.nodes[-1], graph.bounds, context)


def _aside(node: Node) -> Node:
    """The node beside those that follow it."""
    return node if node.kernel is None else replace(node, kernel=replace(node.kernel, aside=True))


def _is_unordered(lookup: Node, graph: Graph, known: set[Value]) -> bool:
    """Whether the rows are known from tokens, and were not sorted before."""
    rows = lookup.operands[0]
    maker = None if rows is None else graph.producers.get(rows)
    return rows in known and not (maker is not None and isinstance(maker.op, SortRows))


def _sort(lookup: Node, graph: Graph, context: PassContext) -> Node:
    """The order of a lookup's rows; those of a table that does not stay in memory are asked for."""
    rows, table, scale = lookup.operands
    if rows is None or table is None:
        raise ValueError("a lookup without rows or table")
    size = sum(value.type.size_bytes for value in (table, scale) if value is not None)
    on_disk = context.machine is not None and size > context.machine.kept_bytes
    operands = (rows, table, scale) if on_disk else (rows, None, None)
    names = (f"{rows.name}.ordered", f"{rows.name}.places")
    return _node(SortRows(), operands, names, lookup.origin.module, graph, context)


def _order_is_free(graph: Graph, lookup: Node) -> bool:
    """Whether nobody minds that looked-up rows stay in the table's order: every reader's declaration says so.

    Sorting exchanges pairs of a token and a row; only where a token has one row is that an exchange along an axis.
    """
    (result,), rows = lookup.results, lookup.operands[0]
    if rows is None or rows.type.shape[1] != 1 or result in graph.outputs:
        return False
    return all(
        ((operand.name, 0),) in reader.op.exchangeable
        for reader in graph.users[result]
        for operand, value in zip(reader.op.operands(), reader.operands, strict=True)
        if value is result
    )


# ---- selected rows ---------------------------------------------------------------------------------------------------


def _gather_once(graph: Graph, context: PassContext) -> Graph:
    uses: dict[tuple[Value | None, ...], list[Node]] = {}
    for node in graph.nodes:
        if isinstance(node.op, Attend) and node.operand("selection") is not None and graph.bounds:
            uses.setdefault(tuple(node.operand(name) for name in ("compressed", "selection", "slots")), []).append(node)
    gathers = {
        readers[0]: gather
        for sources, readers in uses.items()
        if (gather := _gather(sources, readers, graph, context)) is not None
    }
    if not gathers:
        return graph
    rows = {
        reader: gathers[readers[0]].results[0]
        for readers in uses.values()
        if readers[0] in gathers
        for reader in readers
    }
    rewriter = Rewriter(NAME)
    for node in graph.nodes:
        if node in gathers:
            rewriter.nodes.append(gathers[node])
        if node in rows:
            step = rewriter.operands(node)[:10]
            rewriter.put(node, AttendGathered(**node.op.attributes()), *step, rows[node], rewriter.operands(node)[11])
            rewriter.nodes[-1] = select(rewriter.nodes[-1], graph.bounds, context)
        else:
            rewriter.keep(node)
    return rewriter.finish(graph)


def _gather(sources: tuple[Value | None, ...], readers: list[Node], graph: Graph, context: PassContext) -> Node | None:
    """The gathering of what several layers read, None where each does better for itself."""
    compressed, selection, slots = sources
    q, machine = readers[0].operands[0], context.machine
    if q is None or selection is None or machine is None or len(readers) < 2:
        return None
    width = int(q.type.shape[2])
    op = GatherSelected(width, width + PADDING)
    names = (f"{selection.name}.rows",)
    node = _node(op, (compressed, selection, slots), names, readers[0].origin.module, graph, context)
    return node if _seconds_saved(node, readers, graph, context) > 0 else None


def _seconds_saved(gather: Node, readers: list[Node], graph: Graph, context: PassContext) -> float:
    """What gathering saves in a step of as many tokens as the graph serves.

    A reader that gathers for itself reads packed rows and dequantises them to its workspace. It does neither when they
    are gathered; but rows of more bytes than its workspace, which it would have gone through piece by piece, then come
    from memory. Gathering reads and dequantises once, and writes the rows.
    """
    machine = context.machine
    if machine is None:
        return 0.0
    cost = graph.node_cost(gather, graph.bounds)
    written = gather.results[0].type.bind(graph.bounds).size_bytes
    reading = cost.flops / machine.dequantised_per_second + cost.state_bytes / machine.memory_bytes_per_second
    saved = 0.0
    for reader in readers:
        room = reader.kernel.workspace_bytes if reader.kernel is not None else 0
        saved += reading - (written if written > room else 0) / machine.memory_bytes_per_second
    return saved - reading - written / machine.memory_bytes_per_second - machine.launch_seconds


def _node(
    op: Op, operands: tuple[Value | None, ...], names: Iterable[str], module: str, graph: Graph, context: PassContext
) -> Node:
    """A new operation with its kernel."""
    types = op.infer_results(tuple(None if value is None else value.type for value in operands))
    results = tuple(Value(name, type) for name, type in zip(names, types, strict=True))
    return select(Node(op, operands, results, Origin(module, NAME)), graph.bounds, context)
