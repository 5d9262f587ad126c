"""The verifier's rules, one refusal each; the builder, the text form and the interpreter on whole graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from v41c.errors import VerifyError
from v41c.ir.build import Builder
from v41c.ir.graph import Graph, Module, Node, Origin, Selected, Value
from v41c.ir.interpret import interpret
from v41c.ir.ops.add import Add
from v41c.ir.ops.history_write import HistoryWrite
from v41c.ir.ops.linear import Linear
from v41c.ir.ops.reshape import Reshape
from v41c.ir.ops.rms_norm import RmsNorm
from v41c.ir.text import parse_module, print_graph
from v41c.ir.types import DType, TensorType, f32, i32

ORIGIN = Origin("layers.0", "test")


def history_graph() -> Graph:
    """Two writes of one state, one after the other."""
    builder = Builder("g")
    ids, positions, slots = (builder.input(name, i32("T")) for name in ("ids", "positions", "slots"))
    state = builder.state("history", i32("S", 3))
    (second,) = builder.apply(HistoryWrite(), state, ids, positions, slots)
    builder.apply(HistoryWrite(), second, ids, positions, slots)
    return builder.finish()


def add_graph() -> Graph:
    """y = norm(x) + x with a weight."""
    builder = Builder("g")
    x = builder.input("x", f32("T", 8))
    (normed,) = builder.apply(RmsNorm(1e-6), x, builder.weight("norm.weight", f32(8)), module="norm")
    return builder.finish(*builder.apply(Add("f32"), normed, x, names=("y",)))


def test_states_are_linear_and_finals_are_the_last_versions() -> None:
    graph = history_graph()
    assert [value.name for value in graph.finals.values()] == ["history_write.2"]
    assert set(graph.state_versions.values()) == {"history"}


def test_a_stale_state_version_is_refused() -> None:
    graph = history_graph()
    first, second = graph.nodes
    stale = replace(second, operands=first.operands)
    with pytest.raises(VerifyError, match=r"node 1 \(history_write, model\): state history: version history is stale"):
        replace(graph, nodes=(first, stale)).verify()


def test_a_final_that_is_not_last_is_refused() -> None:
    graph = history_graph()
    with pytest.raises(VerifyError, match="state history: final history is not its last version"):
        replace(graph, finals={"history": graph.states[0]}).verify()


def test_missing_finals_are_refused() -> None:
    with pytest.raises(VerifyError, match=r"finals: expected \['history'\], got \[\]"):
        replace(history_graph(), finals={}).verify()


def test_a_state_operand_must_be_a_state() -> None:
    graph = history_graph()
    node = replace(graph.nodes[0], operands=(Value("z", i32("S", 3)), *graph.nodes[0].operands[1:]))
    value = node.operands[0]
    with pytest.raises(VerifyError, match="operand history: z is not a state"):
        replace(graph, inputs=(*graph.inputs, value), nodes=(node,), states=(), finals={}).verify()


def test_use_before_definition_is_refused() -> None:
    graph = add_graph()
    with pytest.raises(VerifyError, match=r"operand norm\.rms_norm is used before it is defined"):
        replace(graph, nodes=tuple(reversed(graph.nodes))).verify()


def test_two_definitions_are_refused() -> None:
    graph = add_graph()
    with pytest.raises(VerifyError, match="value y is defined twice"):
        replace(graph, nodes=(*graph.nodes, graph.nodes[-1])).verify()


def test_an_undefined_output_is_refused() -> None:
    with pytest.raises(VerifyError, match="graph g: output ghost is not defined"):
        replace(add_graph(), outputs=(Value("ghost", f32(1)),)).verify()


def test_a_result_of_another_type_is_refused() -> None:
    graph = add_graph()
    norm, add = graph.nodes
    wrong = Node(add.op, add.operands, (Value("y", f32("T", 9)),), ORIGIN)
    with pytest.raises(VerifyError, match=r"results: expected \(f32\[T,8\]\), got \(f32\[T,9\]\)"):
        replace(graph, nodes=(norm, wrong), outputs=wrong.results).verify()


def test_operands_the_operation_refuses_name_the_node() -> None:
    graph = add_graph()
    norm, add = graph.nodes
    wrong = replace(norm, operands=(graph.inputs[0], Value("w", f32(9))))
    with pytest.raises(
        VerifyError, match=r"node 0 \(rms_norm, norm\): rms_norm: weight shape: expected \[8\], got \[9\]"
    ):
        replace(graph, weights=(wrong.operands[1],), nodes=(wrong, add)).verify()


def test_graphs_must_agree_on_a_state() -> None:
    other = Builder("other")
    other.state("history", i32("S", 4))
    ids, positions, slots = (other.input(name, i32("T")) for name in ("ids", "positions", "slots"))
    other.apply(HistoryWrite(), other.current("history"), ids, positions, slots)
    with pytest.raises(VerifyError, match=r"graph other: state history: expected i32\[S,3\], got i32\[S,4\]"):
        Module((history_graph(), other.finish())).verify()


def test_missing_operands_are_named() -> None:
    with pytest.raises(VerifyError, match="linear: operand weight: expected a value, got none"):
        Linear("f32").infer_results((f32("T", 8), None, None))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense", "line 1: expected `graph NAME {`, got `nonsense`"),
        ("graph g {\n  what\n}", "line 2: not a declaration, operation, final or output: `what`"),
        ("graph g {\n  input %x : f16[T]\n}", "line 2: 'f16' is not a valid DType"),
        ("graph g {\n  input %x : f32\n}", "line 2: not a type: f32"),
        ("graph g {\n  (%y : f32[T]) = nothing(%x) //  | test\n}", "line 2: 'x'"),
        ("graph g {\n  input %x : f32[T,2]\n  (%y : f32[T,2]) = nothing(%x) //  | t\n}", "unknown operation nothing"),
        ("graph g {\n  input %x : f32[T,2]", "graph g: expected `}` at the end of the text"),
    ],
)
def test_text_that_does_not_parse_names_the_line(text: str, message: str) -> None:
    with pytest.raises(VerifyError) as caught:
        parse_module(text)
    assert message in str(caught.value)


def test_attributes_must_match_the_declaration() -> None:
    text = print_graph(add_graph()).replace("{eps=1e-06}", "{epsilon=1e-06}")
    with pytest.raises(VerifyError, match=r"rms_norm: attributes: expected \['eps'\], got \['epsilon'\]"):
        parse_module(text)


def aside(graph: Graph, *numbers: int) -> Graph:
    """The graph with kernels, some of which run aside."""
    nodes = [
        node if node.op.view else replace(node, kernel=Selected(f"kernel_{number}", aside=number in numbers))
        for number, node in enumerate(graph.nodes)
    ]
    return replace(graph, nodes=tuple(nodes))


def test_what_runs_aside_is_waited_for_where_it_is_read() -> None:
    """Views read nothing; an output is read behind the end."""
    builder = Builder("g")
    x = builder.input("x", f32("T", 8))
    (read,), (kept,) = builder.apply(Add("f32"), x, x), builder.apply(Add("f32"), x, x)
    (view,) = builder.apply(Reshape((2, 4)), read)
    (back,) = builder.apply(Reshape((8,)), view)
    (other,) = builder.apply(Add("f32"), x, x)
    graph = aside(builder.finish(*builder.apply(Add("f32"), other, back), kept), 0, 1)
    graph.verify()
    assert [(graph.nodes.index(node), until) for node, until in graph.joins.items()] == [(0, 5), (1, 6)]
    (parsed,) = parse_module(print_graph(graph))
    assert print_graph(parsed) == print_graph(graph)
    assert list(parsed.joins.values()) == [5, 6]


def test_what_runs_aside_has_no_states() -> None:
    with pytest.raises(VerifyError, match=r"node 1 \(history_write, model\): runs aside, but reads a state"):
        aside(history_graph(), 1).verify()


def test_unused_weights_are_dropped_and_names_made_unique() -> None:
    builder = Builder("g")
    x = builder.input("x", f32("T", 8))
    builder.weight("unused", f32(8))
    (first,) = builder.apply(Add("f32"), x, x)
    (second,) = builder.apply(Add("f32"), first, x)
    graph = builder.finish(second)
    assert graph.weights == ()
    assert [node.results[0].name for node in graph.nodes] == ["add", "add.2"]


def test_the_interpreter_leaves_its_states_alone_and_names_what_is_missing() -> None:
    graph = history_graph()
    given = {name: torch.tensor([1, 2], dtype=torch.int32) for name in ("ids", "positions")}
    given["slots"] = torch.zeros(2, dtype=torch.int32)
    state = torch.full((1, 3), 9, dtype=torch.int32)
    run = interpret(graph, given, lambda weight: state, {"history": state})
    assert run.states["history"].tolist() == [[9, 1, 2]]
    assert state.tolist() == [[9, 9, 9]]
    with pytest.raises(VerifyError, match="graph g: slots: expected a tensor, got none"):
        interpret(graph, {n: t for n, t in given.items() if n != "slots"}, lambda weight: state, {"history": state})


def test_cost_counts_weights_states_and_activations_apart() -> None:
    cost = add_graph().cost({"T": 10})
    assert cost.weight_bytes == 8 * 4
    assert cost.activation_bytes == (10 * 8 * 4) * 2 + (10 * 8 * 4) * 3
    assert (cost.launches, cost.state_bytes) == (2, 0)
    assert history_graph().cost({"T": 2, "S": 1}).state_bytes == 2 * 2 * 4


def test_types_print_bind_and_measure() -> None:
    packed = TensorType(DType.F4E2M1, ("E", 6, 32))
    assert str(packed) == "f4e2m1[E,6,32]"
    assert packed.symbols == ("E",)
    assert packed.bind({"E": 3}).size_bytes == 3 * 6 * 16
