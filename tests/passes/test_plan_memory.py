"""plan-memory: values that live together never overlap, and sharing never takes more than keeping everything apart."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from v41c.ir.build import Builder
from v41c.ir.graph import Graph, Module, Node, Value
from v41c.ir.ops.add import Add
from v41c.ir.ops.concat import Concat
from v41c.ir.ops.reshape import Reshape
from v41c.ir.text import parse_module, print_module
from v41c.ir.types import f32
from v41c.passes import plan_memory, select_kernels
from v41c.passes.context import PassContext

CONTEXT = PassContext(
    "release", lambda op, operands, results, bounds: SimpleNamespace(symbol=op.name(), workspace_bytes=100), (7,)
)


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Random chains and trees of additions, concatenations and views over two inputs."""
    builder = Builder("model")
    values = [builder.input("x", f32("T", 4)), builder.input("y", f32("T", 4))]
    for _ in range(draw(st.integers(1, 25))):
        left = draw(st.sampled_from(values))
        kind = draw(st.sampled_from(("add", "concat", "view")))
        if kind == "view":
            width = int(left.type.shape[1])
            (split,) = builder.apply(Reshape((width // 2, 2)), left)
            (result,) = builder.apply(Reshape((width,)), split)
        elif kind == "concat":
            (result,) = builder.apply(Concat(), left, draw(st.sampled_from(values)))
        else:
            (result,) = builder.apply(Add("f32"), left, left)
        if int(result.type.shape[1]) <= 64:
            values.append(result)
    return builder.finish(*draw(st.lists(st.sampled_from(values), min_size=1, max_size=3, unique=True)))


@settings(max_examples=60, deadline=None)
@given(graphs())
def test_no_overlap_while_both_are_needed(graph: Graph) -> None:
    (planned,) = plan_memory.run(select_kernels.run(Module((graph,)), CONTEXT), CONTEXT)
    lives: list[tuple[int, int, int, int, int]] = []
    storage: dict[object, int] = {}
    for node in planned.nodes:
        if node.op.view:
            storage[node.results[0]] = storage.get(node.operands[0], id(node.operands[0]))
    group_of = {value: storage.get(value, id(value)) for value in plan_memory.stored_values(planned)}
    last: dict[int, int] = {}
    first: dict[int, int] = {}
    for value in planned.inputs:
        first[group_of[value]] = last[group_of[value]] = -1
    for index, node in enumerate(planned.nodes):
        for value in (*node.operands, *node.results):
            first.setdefault(group_of[value], index)
            last[group_of[value]] = index
        kernel = node.kernel
        if kernel is not None:
            lives.append((kernel.workspace_offset, kernel.workspace_bytes, index, index, -index - 2))
    for value in planned.outputs:
        last[group_of[value]] = len(planned.nodes)
    for value, group in group_of.items():
        size = value.type.bind(planned.bounds).size_bytes
        assert value.offset % plan_memory.ALIGNMENT_BYTES == 0
        lives.append((value.offset, size, first[group], last[group], group))
    for number, (offset, size, begin, end, group) in enumerate(lives):
        for other, other_size, other_begin, other_end, other_group in lives[number + 1 :]:
            together = begin <= other_end and other_begin <= end and group != other_group
            assert not (together and offset < other + other_size and other < offset + size)


@settings(max_examples=60, deadline=None)
@given(graphs(), st.data())
def test_what_runs_aside_shares_no_byte_with_what_runs_meanwhile(graph: Graph, data: st.DataObject) -> None:
    """Pair by pair: every operation from one aside to the first that reads its result, through views or not."""
    (selected,) = select_kernels.run(Module((graph,)), CONTEXT)
    aside = data.draw(st.sets(st.integers(0, len(selected.nodes) - 1), min_size=1, max_size=4))
    nodes = [
        replace(node, kernel=replace(node.kernel, aside=number in aside)) if node.kernel else node
        for number, node in enumerate(selected.nodes)
    ]
    (planned,) = plan_memory.run(Module((replace(selected, nodes=tuple(nodes)),)), CONTEXT)
    for number, node in enumerate(planned.nodes):
        if node.kernel is None or not node.kernel.aside:
            continue
        made = set(node.results)
        for other in planned.nodes[number + 1 :]:
            if other.op.view:
                made |= set(other.results) if made & set(other.operands) else set()
                continue
            if made & set(other.operands):
                break
            read, written = ({(v.offset, size(v, planned)) for v in values} for values in (node.operands, node.results))
            assert not overlap(written_by(other, planned), read | written | workspace(node))
            assert not overlap({(v.offset, size(v, planned)) for v in other.operands}, written | workspace(node))


def size(value: Value, graph: Graph) -> int:
    return value.type.bind(graph.bounds).size_bytes


def workspace(node: Node) -> set[tuple[int, int]]:
    return {(node.kernel.workspace_offset, node.kernel.workspace_bytes)}


def written_by(node: Node, graph: Graph) -> set[tuple[int, int]]:
    return {(value.offset, size(value, graph)) for value in node.results} | workspace(node)


def overlap(left: set[tuple[int, int]], right: set[tuple[int, int]]) -> bool:
    return any(a < b + more and b < a + size for a, size in left for b, more in right)


@settings(max_examples=30, deadline=None)
@given(graphs())
def test_sharing_never_costs_memory_and_prints(graph: Graph) -> None:
    selected = select_kernels.run(Module((graph,)), CONTEXT)
    shared, apart = plan_memory.run(selected, CONTEXT), plan_memory.place_apart(selected)
    assert plan_memory.arena_bytes(shared["model:7"]) <= plan_memory.arena_bytes(apart["model:7"])
    text = print_module(shared)
    assert print_module(parse_module(text)) == text


def test_a_chain_needs_two_places() -> None:
    """x → a → b → c: at any time only the operand and the result of one addition live."""
    builder = Builder("model")
    value = builder.input("x", f32("T", 64))
    for _ in range(5):
        (value,) = builder.apply(Add("f32"), value, value)
    graph = builder.finish(value)
    context = PassContext("release", lambda *_: SimpleNamespace(symbol="add", workspace_bytes=0), (8,))
    (planned,) = plan_memory.run(select_kernels.run(Module((graph,)), context), context)
    assert plan_memory.arena_bytes(planned) == 2 * 8 * 64 * 4


def test_zero_workspace_is_not_placed() -> None:
    builder = Builder("model")
    x = builder.input("x", f32("T", 4))
    graph = builder.finish(*builder.apply(Add("f32"), x, x))
    context = PassContext("release", lambda *_: SimpleNamespace(symbol="add", workspace_bytes=0), (8,))
    (planned,) = plan_memory.run(select_kernels.run(Module((graph,)), context), context)
    assert planned.nodes[0].kernel is not None
    assert planned.nodes[0].kernel.workspace_offset is None


def test_an_unserved_operation_is_refused() -> None:
    from v41c.codegen.cpu import kernel_for
    from v41c.errors import UnsupportedError
    from v41c.targets.target import find_target

    target = find_target("cpu:x86-64-v3")
    builder = Builder("model")
    x = builder.input("x", f32("T", 4))
    (view,) = builder.apply(Reshape((2, 2)), x)
    graph = builder.finish(view)
    context = PassContext("release", lambda op, a, b, bounds: kernel_for(op, a, b, target, bounds), (8,))
    select_kernels.run(Module((graph,)), context)  # a view needs no kernel
    with pytest.raises(UnsupportedError, match="no kernel"):
        kernel_for(Unserved(), (x.type,), (x.type,), target, {"T": 8})


class Unserved(Add):
    """An operation without a kernel file."""

    def __init__(self) -> None:
        super().__init__("f32")

    @classmethod
    def name(cls) -> str:
        """A name no kernel file has."""
        return "unserved"
