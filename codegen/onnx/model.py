"""A graph as an ONNX model: every operation a call of its local function, weights inside, beside or left as inputs."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from v41c.codegen.onnx import apply
from v41c.codegen.onnx.body import (
    ELEMENT,
    IR_VERSION,
    Array,
    Body,
    Functions,
    Term,
    opset_imports,
    tensor_shape,
)
from v41c.ir.graph import Graph, Value

ReadWeight = Callable[[Value], Array]
#: weights of more bytes than this lie in a file beside the model; a protocol buffer can hold 2 GiB
INLINE_BYTES = 256 << 20
#: runtimes map external data, which needs tensors at page boundaries
PAGE_BYTES = 4096


def build(graph: Graph, about: Mapping[str, str]) -> Any:
    """The ModelProto of a graph, without the values of its weights: they are declared as inputs.

    States are inputs `state.<name>`; those that the graph writes are outputs `state.<name>:out` too. Operations carry
    the module they come from, the pass that made them and their attributes as metadata; `about` is the model's.
    """
    body, names = Body(Functions()), _names(graph)
    terms = {value: Term(body, name, ELEMENT[value.type.dtype], value.type) for value, name in names.items()}
    for node in graph.nodes:
        facts = {"module": node.origin.module, "pass": node.origin.made_by, "attributes": node.op.text()}
        apply(
            body,
            node.op,
            *(None if value is None else terms[value] for value in node.operands),
            names=[names[result] for result in node.results],
            facts={key: text for key, text in facts.items() if text},
        )
    written = [final for final in graph.finals.values() if final not in graph.states]
    outputs = [*_outputs(body, graph, terms), *(_info(names[final], final) for final in written)]
    made = {name for node in body.nodes for name in node.output}
    proto = helper.make_graph(
        body.nodes,
        graph.name,
        [_info(names[value], value) for value in (*graph.inputs, *graph.states, *graph.weights)],
        outputs,
        value_info=[_info(name, value) for value, name in names.items() if name in made - {o.name for o in outputs}],
    )
    model = helper.make_model(
        proto,
        opset_imports=opset_imports(),
        functions=body.functions.protos,
        ir_version=IR_VERSION,
        producer_name="v41c",
    )
    helper.set_model_props(model, dict(about))
    onnx.checker.check_model(model)
    return model


def _names(graph: Graph) -> dict[Value, str]:
    names = {value: value.name for value in (*graph.inputs, *graph.weights)}
    names |= {result: result.name for node in graph.nodes for result in node.results}
    names |= {state: f"state.{state.name}" for state in graph.states}
    finals = {final: f"state.{name}:out" for name, final in graph.finals.items() if final not in graph.states}
    return names | finals


def _outputs(body: Body, graph: Graph, terms: Mapping[Value, Term]) -> Iterator[Any]:
    """Declared outputs; one that no operation makes is copied, since an input cannot be an output as well."""
    made = {result for node in graph.nodes for result in node.results}
    for value in graph.outputs:
        name = terms[value].name
        if value not in made:
            (copy,) = body.append(
                helper.make_node("Identity", [name], []), [ELEMENT[value.type.dtype]], [f"{name}:out"]
            )
            name = copy.name
        yield _info(name, value)


def _info(name: str, value: Value) -> Any:
    return helper.make_tensor_value_info(name, ELEMENT[value.type.dtype], tensor_shape(value.type))


def save(model: Any, path: Path, weights: Sequence[Value], read: ReadWeight | None) -> Path | None:
    """Write a model, and the file of its weights beside it if they are large; gives the latter's path.

    `read` gives a weight as stored; without it, weights stay inputs. Each file appears complete or not at all.
    """
    data = None
    if read is not None:
        kept = [declared for declared in model.graph.input if declared.name not in {value.name for value in weights}]
        del model.graph.input[:]
        model.graph.input.extend(kept)
        if sum(value.type.size_bytes for value in weights) <= INLINE_BYTES:
            model.graph.initializer.extend(_inline(value, read(value)) for value in weights)
        else:
            data = path.with_name(path.name + ".data")
            with _replacing(data) as file:
                model.graph.initializer.extend(_external(value, read(value), file, data.name) for value in weights)
    with _replacing(path) as file:
        file.write(model.SerializeToString(deterministic=True))
    return data


def _inline(value: Value, array: Array) -> Any:
    return TensorProto(
        name=value.name,
        data_type=ELEMENT[value.type.dtype],
        dims=tensor_shape(value.type),
        raw_data=np.ascontiguousarray(array).tobytes(),
    )


def _external(value: Value, array: Array, file: IO[bytes], location: str) -> Any:
    """A weight appended to the data file."""
    file.write(bytes(-file.tell() % PAGE_BYTES))
    place = {"location": location, "offset": file.tell(), "length": array.nbytes}
    file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    tensor = TensorProto(
        name=value.name,
        data_type=ELEMENT[value.type.dtype],
        dims=tensor_shape(value.type),
        data_location=TensorProto.EXTERNAL,
    )
    for key, fact in place.items():
        tensor.external_data.add(key=key, value=str(fact))
    return tensor


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file beside `path` that takes its place when the block succeeds, and is removed when not."""
    with tempfile.NamedTemporaryFile(prefix=f".{path.name}.", dir=path.parent, delete=False) as file:
        try:
            yield file
            file.flush()
            os.chmod(file.name, 0o644)
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
