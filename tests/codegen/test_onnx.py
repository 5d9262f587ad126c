"""Operations as ONNX functions are their references under ONNX Runtime, on examples and on the shipped model's data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import onnx
import pytest
import torch
from torch import Tensor

from tests.codegen.onnx_harness import Session, by_session
from tests.codegen.sparse_harness import reference, symbolic_types
from tests.played import SHIPPED, distance, interpreted, play, step, unwritten, weight
from tests.traced import context, traced
from v41c.codegen.onnx import model as onnx_model
from v41c.codegen.onnx.body import DOMAIN, Body, Functions
from v41c.codegen.onnx.model import build, save
from v41c.errors import UnsupportedError
from v41c.frontend.weights import as_numpy
from v41c.ir import formats
from v41c.ir.build import Builder
from v41c.ir.graph import Graph, Module, Value
from v41c.ir.op import Example, Op, seeded
from v41c.ir.ops import op_types
from v41c.ir.ops.add import Add
from v41c.ir.ops.cache_write import CacheWrite
from v41c.ir.ops.round_trip import RoundTrip
from v41c.ir.torch_types import torch_dtype
from v41c.ir.types import TensorType, f32
from v41c.passes import select_kernels, split_encoder_decoder
from v41c.passes.pipeline import TRACE, pass_names, run_pipeline
from v41c.subject import Arithmetic

EXAMPLES = [
    pytest.param(example, id=f"{name}-{index}")
    for name, op in sorted(op_types().items())
    for index, example in enumerate(op.examples())
]
STATES = ("window", "compressed", "keys", "history", "partial", "cache")
# a prompt that leaves a group of two open, the token that closes it, and enough to go around the window
CHUNKS = (13, 1, 22)


def example_graph(example: Example) -> Graph:
    """A graph of one operation, of a symbolic number of tokens, sequences and cache rows."""
    builder = Builder("example")
    types, _ = symbolic_types(example.op, example.operands)
    values = [
        None if kind is None else (builder.state if declared.name in STATES else builder.input)(declared.name, kind)
        for declared, kind in zip(example.op.operands(), types, strict=True)
    ]
    results = builder.apply(example.op, *values)
    return builder.finish(*results[len(example.op.states) :])


def require_close(found: Tensor, wanted: Tensor, what: str, terms: int) -> None:
    """Integers and bytes are equal. Floats: a sum of n terms in another order differs by n · 2^-24 of what they amount
    to, which is about the largest result; a few roundings of a result follow, in bf16 one that may go to the neighbour.
    """
    assert found.dtype == wanted.dtype, what
    assert found.shape == wanted.shape, what
    if not wanted.is_floating_point():
        assert torch.equal(found, wanted), what
        return
    left, right = found.double(), wanted.double()
    fresh = right.isnan()
    assert torch.equal(left.isnan(), fresh), what
    magnitude = right[~fresh].abs()
    if magnitude.numel():
        rounding = 2.0**-7 if wanted.dtype == torch.bfloat16 else 2.0**-21
        bound = rounding * magnitude + terms * 2.0**-24 * magnitude.max()
        excess = ((left - right)[~fresh].abs() / bound.clamp_min(1e-30)).max()
        assert excess <= 1, f"{what}: {excess:.2f} times the bound"


def longest(operands: tuple[Tensor | None, ...]) -> int:
    """At least the number of terms of any sum over operands like these."""
    return max(max(operand.shape) for operand in operands if operand is not None)


def results(example: Example) -> list[Tensor]:
    """What ONNX Runtime makes of an example: states, then the other results."""
    graph = example_graph(example)
    named = dict(zip((declared.name for declared in example.op.operands()), example.operands, strict=True))
    given = {f"state.{name}" if name in STATES else name: value for name, value in named.items() if value is not None}
    outputs = Session(build(graph, {}).SerializeToString()).run(given)
    names = [f"state.{state}:out" for state in example.op.states] + [value.name for value in graph.outputs]
    return [outputs[name] for name in names]


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_example_is_the_reference(example: Example) -> None:
    wanted = reference(example.op, example.operands)
    for index, (ours, theirs) in enumerate(zip(results(example), wanted, strict=True)):
        require_close(ours, theirs, f"result {index}", longest(example.operands))


@pytest.mark.parametrize("name", formats.FORMATS)
def test_formats_are_exact_where_logarithms_and_roundings_are_not(name: str) -> None:
    """Scales around powers of two, half-way points, both zeros, subnormals: rounded and packed to the same bits."""
    rule = formats.FORMATS[name]
    powers = rule.largest * 2.0 ** torch.arange(-20, 20, dtype=torch.float32)
    infinity, zero = torch.tensor(torch.inf), torch.tensor(0.0)
    around = [powers, torch.nextafter(powers, infinity), torch.nextafter(powers, zero)]
    maxima = torch.cat([*around, torch.tensor([0.0, 1e-45, 1e-30, rule.floor, 1e20])])
    half_way = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]) / 6
    normal = seeded(31)(len(maxima), 480).clamp(-1, 1)
    x = torch.cat((half_way.expand(len(maxima), 7), -half_way.expand(len(maxima), 7), normal, normal[:, :18]), 1)
    x[:, 14::16], x[:, 15::16] = 1.0, -0.0
    x *= maxima.unsqueeze(1)
    for op, operands in (
        (RoundTrip(name), (x,)),
        (
            CacheWrite(1, name),
            (
                torch.full((1, len(x), rule.row_bytes(512)), 255, dtype=torch.uint8),
                x,
                *places(len(x)),
                torch.zeros(len(x), dtype=torch.int32),
            ),
        ),
    ):
        example = Example(op, operands)
        (found,) = results(example)
        (wanted,) = reference(op, operands)
        assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8)), op.name()


def places(count: int) -> tuple[Tensor, Tensor]:
    """Positions from 0 on, all of slot 0."""
    positions = torch.arange(count, dtype=torch.int32)
    return positions, torch.zeros_like(positions)


def test_equal_bodies_are_one_function_and_others_are_numbered() -> None:
    builder = Builder("sums")
    x, y = builder.input("x", f32("T", 8)), builder.input("y", f32("T", 5))
    (a,) = builder.apply(Add("f32"), x, x)
    (b,) = builder.apply(Add("f32"), y, y)
    (c,) = builder.apply(Add("bf16"), b, b, module="layers.0")
    model = build(builder.finish(a, c), {"pass": "trace"})
    assert [function.name for function in model.functions] == ["add", "add_2"]
    assert [node.op_type for node in model.graph.node] == ["add", "add", "add_2"]
    last = model.graph.node[-1]
    assert (last.domain, last.name) == (DOMAIN, "layers.0.add")
    facts = {entry.key: entry.value for entry in last.metadata_props}
    assert facts == {"module": "layers.0", "pass": "trace", "attributes": '{out="bf16"}'}
    assert {entry.key: entry.value for entry in model.metadata_props} == {"pass": "trace"}
    sizes = [dim.dim_param or dim.dim_value for dim in model.graph.output[0].type.tensor_type.shape.dim]
    assert sizes == ["T", 8]


def test_an_output_that_is_an_input_is_copied() -> None:
    builder = Builder("echo")
    x = builder.input("x", f32("T", 2))
    values = torch.tensor([[1.0, -2.0]])
    outputs = Session(build(builder.finish(x), {}).SerializeToString()).run({"x": values})
    assert torch.equal(outputs["x:out"], values)


def test_an_operation_without_a_function_is_named() -> None:
    class Mystery(Op):
        @classmethod
        def name(cls) -> str:
            return "mystery"

        def infer(self, x: TensorType) -> TensorType:
            return x

    builder = Builder("unknown")
    (y,) = builder.apply(Mystery(), builder.input("x", f32("T")))
    with pytest.raises(UnsupportedError, match=r"mystery in ONNX: no function; expected codegen/onnx/mystery\.py"):
        build(builder.finish(y), {})


def test_what_a_body_says_twice_it_computes_once() -> None:
    f = Body(Functions())
    x = f.term(1.5)
    assert f.Neg(x) is f.Neg(x)
    assert [node.op_type for node in f.nodes] == ["Constant", "Neg"]


@cache
def modules(arithmetic: Arithmetic) -> dict[str, Module]:
    """The shipped model's graphs after every pass that rewrites them, by pass."""
    names = pass_names()
    chosen = names[: names.index(select_kernels.NAME)]
    _, module = traced(SHIPPED)
    return {stage.name: stage.module for stage in run_pipeline(module, context(arithmetic), chosen)}


def session(graph: Graph, folder: Path) -> Session:
    """A graph with the shipped weights, through a file."""
    path = folder / f"{graph.name}.onnx"
    save(build(graph, {}), path, graph.weights, lambda value: as_numpy(weight(value.name, value.type)))
    return Session(path)


def test_the_shipped_model_is_the_interpreters(tmp_path: Path) -> None:
    """Encoder, decoder and draft graphs in exact arithmetic: f32 sums in another order are all that differs.

    Measured: 1.7e-6 of the largest value. Selected rows, experts, rows of tables and drafts are the same.
    """
    stages = modules("exact")
    module = stages[split_encoder_decoder.NAME]
    sessions = {graph.name: session(graph, tmp_path) for graph in module}

    run = by_session(sessions)
    with torch.inference_mode():
        pairs = zip(play(module, run, CHUNKS), play(module, interpreted, CHUNKS), strict=True)
        for (name, found), (_, wanted) in pairs:
            assert found.dtype == wanted.dtype, name
            assert torch.equal(found.isnan(), wanted.isnan()), name
            assert distance(found, wanted) <= 2.0**-16, name
            assert wanted.is_floating_point() or torch.equal(found, wanted), name


def apart(graph: Graph) -> Graph:
    """Every operation for itself: what operations make becomes outputs, and what they take of that becomes inputs."""
    made = {result for node in graph.nodes for result in node.results}
    given = {value: Value(f"given.{value.name}", value.type) for value in made}
    nodes = [
        replace(node, operands=tuple(None if v is None else given.get(v, v) for v in node.operands))
        for node in graph.nodes
    ]
    taken = {value: None for node in nodes for value in node.operands if value in set(given.values())}
    outputs = tuple(result for node in graph.nodes for result in node.results)
    return Graph(graph.name, (*graph.inputs, *graph.states, *taken), graph.weights, (), tuple(nodes), outputs)


@pytest.mark.parametrize("first", [True, False], ids=["traced", "fused"])
def test_every_operation_of_the_shipped_model_on_its_own_data(first: bool, tmp_path: Path) -> None:
    """In release arithmetic, where roundings amplify what differs, each operation gets the interpreter's operands."""
    stages = modules("release")
    module = stages[TRACE] if first else list(stages.values())[-1]
    sessions = {graph.name: session(apart(graph), tmp_path) for graph in module}

    def run(
        graph: Graph, values: Mapping[str, Tensor], states: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        tensors = {value: values[value.name] for value in graph.inputs}
        tensors |= {value: states[value.name] for value in graph.states}
        tensors |= {value: weight(value.name, value.type) for value in graph.weights}
        for node in graph.nodes:
            operands = tuple(None if value is None else tensors[value] for value in node.operands)
            tensors |= dict(zip(node.results, reference(node.op, operands), strict=True))
        named = {value.name: tensor for value, tensor in tensors.items()}
        found = sessions[graph.name].run(named | {f"given.{name}": tensor for name, tensor in named.items()})
        for node in graph.nodes:
            terms = longest(tuple(None if value is None else tensors[value] for value in node.operands))
            for value in node.results:
                require_close(found[value.name], tensors[value], f"{graph.name}: {value.name}", terms)
        finals = {name: tensors[final] for name, final in graph.finals.items()}
        return {value.name: tensors[value] for value in graph.outputs}, finals

    with torch.inference_mode():
        for _ in play(module, run, (7, 1)):
            pass


def test_large_weights_lie_beside_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same model from one file and from two; both pass every check of onnx, and again are the same bytes."""
    graph = modules("release")[TRACE]["draft_context"]
    values = step(torch.tensor([7], dtype=torch.int32), 3)
    hidden = graph.inputs[0]
    values[hidden.name] = torch.linspace(-2, 2, int(hidden.type.shape[1])).to(torch_dtype(hidden.type.dtype))[None]
    values |= {f"state.{state.name}": unwritten(state.type.bind({"S": 1})) for state in graph.states}
    inline = session(graph, tmp_path).run(values)
    monkeypatch.setattr(onnx_model, "INLINE_BYTES", 0)
    beside = session(graph, tmp_path).run(values)
    assert beside.keys() == inline.keys()
    assert all(torch.equal(beside[name], inline[name]) for name in inline)
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert files.keys() == {"draft_context.onnx", "draft_context.onnx.data"}
    assert len(files["draft_context.onnx"]) < len(files["draft_context.onnx.data"]) / 2
    onnx.checker.check_model(str(tmp_path / "draft_context.onnx"), full_check=True)
    session(graph, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == files
