"""reorder-sparse-gathers: what it proves before it moves anything, when it gathers, and that no bit moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from tests.codegen.sparse_harness import same
from tests.played import interpreted, play
from tests.traced import traced
from v41c.arena import interpret_in_arena, overlaps
from v41c.codegen.cpu import kernel_for
from v41c.errors import UnsupportedError
from v41c.ir.build import Builder
from v41c.ir.graph import Graph, Module
from v41c.ir.interpret import interpret
from v41c.ir.op import Op
from v41c.ir.ops.add import Add
from v41c.ir.ops.attend import Attend
from v41c.ir.ops.engram_hash import EngramHash
from v41c.ir.ops.engram_lookup import EngramLookup
from v41c.ir.ops.history_write import HistoryWrite
from v41c.ir.ops.index_topk import IndexTopk
from v41c.ir.types import DType, TensorType, f32, i32
from v41c.passes import fuse_attention, merge_projections, plan_memory, reorder_sparse_gathers, select_kernels
from v41c.passes.context import PassContext
from v41c.targets import x86_64

BOUNDS = {"S": 1, "C1": 4096, "C2": 2048}
#: gathers whatever is read twice, and takes every table for one on disk
EAGER = replace(x86_64.V4, kept_bytes=0, memory_bytes_per_second=1e30, dequantised_per_second=1.0, launch_seconds=0.0)
HASH = EngramHash((7, 5, 3), (499, 491), (0, 499), 2)


def context(variants: Sequence[int], machine: Any = x86_64.V4) -> PassContext:
    """Kernels of the processor, for their workspace."""

    def kernel(op: Op, operands: Any, results: Any, bounds: Mapping[str, int]) -> Any:
        return kernel_for(op, operands, results, x86_64.V4, bounds)

    return PassContext("release", kernel, tuple(variants), BOUNDS, {}, machine)


def reordered(graphs: Sequence[Graph], variants: Sequence[int], machine: Any = x86_64.V4) -> Module:
    given = context(variants, machine)
    after = reorder_sparse_gathers.run(select_kernels.run(Module(tuple(graphs)), given), given)
    after.verify()
    return after


def names(graph: Graph) -> list[str]:
    return [node.op.name() for node in graph.nodes]


# ---- Engram rows -----------------------------------------------------------------------------------------------------


def engram(builder: Builder, ids: Any, table_rows: int = 999, rows: int = 2) -> tuple[Any, ...]:
    """An Engram lookup of ids behind nothing, with its state."""
    history, at = builder.state("history", i32("S", 2)), builder.input("at", i32("T"))
    op = replace(HASH, primes=HASH.primes * (rows // 2), offsets=HASH.offsets * (rows // 2))
    (hashed,) = builder.apply(op, ids, history, at, at, at)
    table = builder.weight("table", TensorType(DType.BF16, (table_rows, 32)))
    return at, *builder.apply(EngramLookup("bf16"), hashed, table, None)


def test_rows_that_follow_from_tokens_are_read_in_order() -> None:
    builder = Builder("draft")
    ids = builder.input("ids", i32("T"))
    at, values = engram(builder, ids)
    builder.apply(HistoryWrite(), builder.current("history"), ids, at, at)
    (graph,) = reordered([builder.finish(values)], (1,), EAGER)
    assert names(graph) == ["engram_hash", "sort_rows", "engram_lookup_ordered", "history_write"]


def selected(builder: Builder) -> Any:
    """Integers that a layer's output chose."""
    at = builder.input("chosen_at", i32("T"))
    q, keys = builder.input("q", f32("T", 1, 32)), builder.input("keys", f32("S", "C1", 32))
    (chosen,) = builder.apply(IndexTopk(1, 2, 1.0, 1), q, builder.input("w", f32("T", 1)), keys, at, at, None)
    return chosen


def test_rows_that_a_layer_chose_stay_where_they_are() -> None:
    builder = Builder("draft")
    at, values = engram(builder, builder.input("ids", i32("T")))
    (graph,) = reordered([_hashing(builder, selected(builder), at, values)], (1,), EAGER)
    assert "sort_rows" in names(graph)  # the other Engram's
    assert names(graph).count("engram_lookup") == 1


def _hashing(builder: Builder, chosen: Any, at: Any, *outputs: Any) -> Graph:
    """A second lookup, whose n-grams end in what a layer chose."""
    (hashed,) = builder.apply(HASH, at, chosen, at, at, at)
    (values,) = builder.apply(EngramLookup("bf16"), hashed, builder.weights["table"], None)
    return builder.finish(*outputs, values)


@pytest.mark.parametrize("spoiled", [False, True])
def test_a_state_counts_by_what_every_graph_writes_to_it(spoiled: bool) -> None:
    """The history of one graph is written by another: by token ids, or by what a layer chose."""
    reader = Builder("draft")
    _, values = engram(reader, reader.input("ids", i32("T")))
    writer = Builder("draft_context")
    history, at = writer.state("history", i32("S", 2)), writer.input("at", i32("T"))
    ids = writer.input("ids", i32("T"))
    if spoiled:
        (ids_now,) = writer.apply(EngramCut(), selected(writer))
    else:
        ids_now = ids
    writer.apply(HistoryWrite(), history, ids_now, at, at)
    after = reordered([reader.finish(values), writer.finish()], (1,), EAGER)
    assert ("sort_rows" in names(after["draft:1"])) is not spoiled


@pytest.mark.parametrize("spoiled", [False, True])
def test_an_input_counts_by_the_graph_that_makes_it(spoiled: bool) -> None:
    maker, reader = Builder("encoder"), Builder("decoder")
    source = selected(maker) if spoiled else maker.input("ids", i32("T", 2))
    (crossing,) = maker.apply(EngramCut(), source, names=("crossing",))
    _, values = engram(reader, reader.input("crossing", i32("T")))
    after = reordered([maker.finish(crossing), reader.finish(values)], (1,), EAGER)
    assert ("sort_rows" in names(after["decoder:1"])) is not spoiled


@dataclass(frozen=True)
class EngramCut(Op):
    """out[t] = x[t, 0]: integers of integers."""

    view: ClassVar[bool] = True  # no kernel is asked for

    def infer(self, x: TensorType) -> TensorType:
        return i32(x.shape[0])


@dataclass(frozen=True)
class OverTokens(Op):
    """Something of all tokens, in any order if it says so."""

    view: ClassVar[bool] = True

    def infer(self, x: TensorType) -> TensorType:
        return x


@dataclass(frozen=True)
class OverAnyTokens(OverTokens):
    """Something of all tokens in any order."""

    exchangeable: ClassVar[tuple[tuple[tuple[str, int], ...], ...]] = ((("x", 0),),)


@pytest.mark.parametrize("reader", [OverTokens(), OverAnyTokens()])
def test_order_is_restored_unless_the_reader_says_it_does_not_matter(reader: Op) -> None:
    builder = Builder("draft")
    rows = builder.input("rows", TensorType(DType.I64, ("T", 1)))
    table = builder.weight("table", TensorType(DType.BF16, (99, 32)))
    (values,) = builder.apply(EngramLookup("bf16"), rows, table, None)
    (graph,) = reordered([builder.finish(*builder.apply(reader, values))], (4,), EAGER)
    assert ("engram_lookup_ordered" in names(graph)) is not bool(reader.exchangeable)
    assert "sort_rows" in names(graph)
    assert reorder_sparse_gathers.run(Module((graph,)), context((4,), EAGER))["draft:4"].nodes == graph.nodes


def test_a_target_that_runs_kernels_aside_reads_rows_at_once() -> None:
    """Two Engrams behind a layer each: both are read before the first, each is waited for by what reads it."""
    builder = Builder("draft")
    at, x = builder.input("at", i32("T")), builder.input("x", TensorType(DType.BF16, ("T", 64)))
    history, table = builder.state("history", i32("S", 2)), builder.weight("table", TensorType(DType.BF16, (999, 32)))
    for _ in range(2):
        (hashed,) = builder.apply(HASH, at, history, at, at, at)
        (layer,) = builder.apply(Add("bf16"), x, x)
        (values,) = builder.apply(EngramLookup("bf16"), hashed, table, None)
        (x,) = builder.apply(Add("bf16"), layer, values)
    (plain,) = reordered([builder.finish(x)], (3,))
    (graph,) = reordered([builder.finish(x)], (3,), replace(x86_64.V4, runs_aside=True))
    assert names(plain)[4:] == ["add", "engram_lookup_ordered", "add"] * 2
    assert names(graph)[2:] == ["sort_rows", "engram_lookup_ordered"] * 2 + ["add"] * 4
    assert [(graph.nodes.index(node), until) for node, until in graph.joins.items()] == [(3, 7), (5, 9)]
    # run as late as they may, in an arena of NaN, they give what the others give
    (planned,) = plan_memory.run(Module((graph,)), context((3,)))
    random = torch.Generator().manual_seed(3)
    weight = torch.randn(999, 32, generator=random).bfloat16()
    given = {"at": torch.arange(3, dtype=torch.int32) * 0, "x": torch.randn(3, 64, generator=random).bfloat16()}
    states = {"history": torch.zeros(1, 2, dtype=torch.int32)}
    (found,) = interpret_in_arena(planned, given, lambda value: weight, states).outputs.values()
    (wanted,) = interpret(plain, given, lambda value: weight, states).outputs.values()
    assert same(found, wanted)
    assert not list(overlaps(planned))


@pytest.mark.parametrize(("rows", "asked"), [(1000, False), (x86_64.V4.kept_bytes // 64 + 1, True)])
def test_only_tables_that_do_not_stay_in_memory_are_asked_for(rows: int, asked: bool) -> None:
    builder = Builder("draft")
    _, values = engram(builder, builder.input("ids", i32("T")), rows)
    (graph,) = reordered([builder.finish(values)], (1,))
    (node,) = (node for node in graph.nodes if node.op.name() == "sort_rows")
    assert (node.operand("table") is not None) is asked
    lookup = next(node for node in graph.nodes if node.op.name() == "engram_lookup_ordered")
    # what is read counts once, where it is read
    read = graph.node_cost(lookup, graph.bounds).weight_bytes
    assert (graph.node_cost(node, graph.bounds).weight_bytes, read) == (0, 2 * 64)


# ---- selected rows ---------------------------------------------------------------------------------------------------


def attending(layers: int, heads: int, width: int, topk: int, window: int = 128) -> Graph:
    """Layers that attend to one selection of one cache."""
    builder = Builder("draft")
    at, chosen = builder.input("at", i32("T")), builder.input("chosen", i32("T", topk))
    cache = builder.state("cache", TensorType(DType.U8, ("S", "C1", width * 9 // 16)))
    turn = builder.input("turn", f32("T", 8))
    kv = builder.input("kv", TensorType(DType.BF16, ("T", width)))
    q = builder.input("q", TensorType(DType.BF16, ("T", heads, width)))
    for layer in range(layers):
        ring = builder.state(f"layers.{layer}.window", TensorType(DType.U8, ("S", window, width * 33 // 32)))
        sink = builder.weight("sink", f32(heads))
        step = (q, kv, sink, ring, at, at, at, at, turn, turn, cache, chosen)
        _, q = builder.apply(Attend(0.1), *step, module=f"layers.{layer}.attn")
    return builder.finish(q)


@pytest.mark.parametrize(
    ("layers", "tokens", "gathers"),
    [
        (6, 1, True),  # a token of the release's shapes, and the layers that reuse a selection there
        (4, 1, True),
        (3, 1, True),
        (2, 1, False),  # the rows are written and read again for one dequantisation less
        (1, 1, False),
        (6, 512, False),  # half a gigabyte of rows
        (6, 16, False),
    ],
)
def test_the_cost_model_decides(layers: int, tokens: int, gathers: bool) -> None:
    (graph,) = reordered([attending(layers, 64, 512, 512)], (tokens,))
    assert names(graph).count("gather_selected") == int(gathers)
    assert names(graph).count("attend_gathered") == (layers if gathers else 0)


def test_each_variant_is_decided_for_itself() -> None:
    one, many = reordered([attending(6, 64, 512, 512)], (1, 512))
    assert "gather_selected" in names(one)
    assert "gather_selected" not in names(many)
    before = select_kernels.run(Module((attending(6, 64, 512, 512),)), context((1,)))["draft:1"]
    # 512 rows of 288 bytes, read six times before and once now, beside windows of 128 rows of 528 bytes
    packed = 512 * 288
    assert before.cost(before.bounds).state_bytes - one.cost(one.bounds).state_bytes == 5 * packed


def test_slow_memory_or_fast_dequantisation_keep_rows_where_they_are() -> None:
    slow = replace(x86_64.V4, memory_bytes_per_second=1e9)
    fast = replace(x86_64.V4, dequantised_per_second=1e12, launch_seconds=1e-3)
    for machine in (slow, fast):
        (graph,) = reordered([attending(4, 64, 512, 512)], (1,), machine)
        assert "gather_selected" not in names(graph)


def test_what_the_target_has_no_kernel_for_is_not_made() -> None:
    given = context((1,), EAGER)

    def kernel(op: Op, *types: Any) -> Any:
        if op.name() in ("attend_gathered", "engram_lookup_ordered"):
            raise UnsupportedError(f"{op.name()}: no kernel")
        return given.kernel_for(op, *types)

    builder = Builder("draft_context")
    _, values = engram(builder, builder.input("ids", i32("T")))
    module = select_kernels.run(Module((attending(6, 4, 64, 64), builder.finish(values))), given)
    for graph in reorder_sparse_gathers.run(module, replace(given, kernel_for=kernel)):
        assert graph is module[graph.name]


def test_without_a_machine_nothing_is_weighed() -> None:
    (graph,) = reordered([attending(6, 64, 512, 512)], (1,), None)
    assert names(graph) == ["attend"] * 6


# ---- the model -------------------------------------------------------------------------------------------------------


def test_the_model_keeps_every_bit() -> None:
    """The shipped model, everything gathered and every table asked for, against the graphs as they were traced."""
    _, module = traced("tiny-v41")
    plain = PassContext("release", _no_kernel, (40,))  # type: ignore[arg-type]
    fused = fuse_attention.run(merge_projections.run(module, plain), plain)
    given = replace(
        context((40,), EAGER), kernel_for=lambda op, *_: SimpleNamespace(symbol=op.name(), workspace_bytes=0)
    )
    after = reorder_sparse_gathers.run(select_kernels.run(fused, given), given)
    after.verify()
    counts = [names(graph).count(name) for graph in after for name in ("gather_selected", "engram_lookup_ordered")]
    assert sum(counts) == 5 + 2
    renamed = Module(tuple(replace(graph, name=graph.name.partition(":")[0]) for graph in after))
    chunks = (35, 1, 20, 1)
    for (name, wanted), (other, found) in zip(
        play(module, interpreted, chunks), play(renamed, interpreted, chunks), strict=True
    ):
        assert name == other
        assert same(wanted, found), name


def _no_kernel(*_: object) -> None:
    raise AssertionError("no kernel is selected here")
