"""Tracing the eager model into the IR through torch.export, with parameters as metadata only.

The model runs once on fake tensors; every semantic operation is one node of the exported program, and is mapped one to
one. Operations write states in place; here each write becomes the next version of the state. The names that the model
gives its landmarks (`Step.record`) become the names of the values.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, ExportedProgram, export
from torch.export.graph_signature import InputKind
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from v41c.errors import TraceError
from v41c.frontend.apply import NAMESPACE, tracing
from v41c.frontend.config import ModelConfig
from v41c.frontend.from_aten import import_aten
from v41c.frontend.loading import checkpoint_name, skeleton
from v41c.frontend.model import Model, state_shapes
from v41c.frontend.tensor_names import TensorFormats
from v41c.frontend.vision import Patches
from v41c.ir.build import Builder
from v41c.ir.graph import Graph, Module, Value
from v41c.ir.ops import op_types
from v41c.ir.torch_types import torch_dtype, type_of
from v41c.ir.types import DType, TensorType, i32

COMPRESSED_IDS = "engram.compressed_ids"
# sizes of the example: any values that are no static size of the model do, they only tell the symbols apart
_TOKENS, _ROWS, _SLOTS, _CONTEXT = 61, 7, 3, 3 * 5 * 7 * 11 * 13


def trace(config: ModelConfig, formats: TensorFormats, engram_pad: int = 0) -> Module:
    """Graphs `model`, with a draft head `draft_context` and `draft`, and with a vision tower `vision`.

    In release arithmetic. No weight is read or allocated. TraceError names an operation that the importer does not know
    and its module.
    """
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True, static_shapes=True)
    with mode:
        model = skeleton(config, formats, pad=engram_pad)
        graphs = [_trace_phase(model, phase) for phase in _phases(model)]
    return Module(tuple(graphs))


@dataclass(frozen=True)
class _Phase:
    """A way to call the model: its graph name, its inputs with symbolic shapes, its states, and the call."""

    name: str
    inputs: dict[str, TensorType]
    states: tuple[str, ...]
    call: Callable[..., dict[str, Any]]


def _phases(model: Model) -> list[_Phase]:
    c = model.config
    states = tuple(state_shapes(c, model.arithmetic, 1, 1))
    backbone = tuple(name for name in states if not name.startswith("mtp."))
    drafting = tuple(name for name in states if name.startswith("mtp."))
    batch = {name: i32("T") for name in ("tokens", "positions", "slots", "first")}

    def run_model(inputs: dict[str, Tensor], states: dict[str, Tensor]) -> dict[str, Any]:
        record: dict[str, Tensor] = {}
        logits, hidden = model.step(**inputs, states=states, record=record.__setitem__)
        return {
            "outputs": {"logits": logits} | ({"main_hidden": hidden} if hidden is not None else {}),
            "record": record,
        }

    def run_context(inputs: dict[str, Tensor], states: dict[str, Tensor]) -> dict[str, Any]:
        model.draft_context(**inputs, states=states)
        return {"outputs": {}, "record": {}}

    def run_draft(inputs: dict[str, Tensor], states: dict[str, Tensor]) -> dict[str, Any]:
        record: dict[str, Tensor] = {}
        results = model.draft(**inputs, states=states, record=record.__setitem__)
        return {"outputs": dict(zip(("logits", "drafts", "confidence"), results, strict=True)), "record": record}

    inputs = batch | {"kept": i32("T"), "rows": i32("R")}
    if c.has_vision:
        inputs |= {"image_rows": i32("T"), "image_values": TensorType(DType.BF16, ("T", c.dim))}
    phases = [_Phase("model", inputs, backbone, run_model)]
    if c.has_draft:
        context = {
            "main_hidden": TensorType(DType.BF16, ("T", len(c.dspark_target_layer_ids) * c.dim)),
            "positions": batch["positions"],
            "slots": batch["slots"],
        }
        phases.append(_Phase("draft_context", context, drafting, run_context))
        phases.append(_Phase("draft", batch, drafting, run_draft))
    if c.has_vision:
        phases.append(_vision_phase(model))
    return phases


def _vision_phase(model: Model) -> _Phase:
    """The vision tower: its T tokens are patches, and it gives R rows."""
    c = model.config
    inputs = {"patches": TensorType(DType.BF16, ("T", 3 * c.vision_patch_size**2))}
    inputs |= {name: i32("T") for name in ("patch_rows", "patch_columns", "begins", "ends")}
    inputs["sources"] = i32("R", c.vision_downsample_ratio**2)

    def run_vision(inputs: dict[str, Tensor], states: dict[str, Tensor]) -> dict[str, Any]:
        record: dict[str, Tensor] = {}
        features = model.see(Patches(*inputs.values()), record.__setitem__)
        return {"outputs": {"features": features}, "record": record}

    return _Phase("vision", inputs, (), run_vision)


class _Wrapper(nn.Module):
    """The module that torch.export sees: the model, called in one phase."""

    def __init__(self, model: Model, phase: _Phase) -> None:
        super().__init__()
        self.model = model
        self._call = phase.call

    def forward(self, inputs: dict[str, Tensor], states: dict[str, Tensor]) -> dict[str, Any]:
        """Outputs and landmarks."""
        return self._call(inputs, states)


def _trace_phase(model: Model, phase: _Phase) -> Graph:
    state_types = symbolic_states(model, phase.states)
    dims = {"T": _TOKENS, "R": _ROWS, "S": _SLOTS} | {
        f"C{ratio}": _CONTEXT // ratio for ratio in set(model.config.compress_ratios) - {0}
    }
    symbols = {name: Dim(name, min=2, max=2**31 - 1) for name in dims}

    def example(types: dict[str, TensorType]) -> dict[str, Tensor]:
        bound = {name: type.bind(dims) for name, type in types.items()}
        return {n: torch.empty([int(d) for d in t.shape], dtype=torch_dtype(t.dtype)) for n, t in bound.items()}

    def dynamic(types: dict[str, TensorType]) -> dict[str, Any]:
        return {
            name: {axis: symbols[dim] for axis, dim in enumerate(type.shape) if isinstance(dim, str)}
            for name, type in types.items()
        }

    wrapper = _Wrapper(model, phase)
    arguments = (example(phase.inputs), example(state_types))
    shapes = {"inputs": dynamic(phase.inputs), "states": dynamic(state_types)}
    try:
        with tracing():
            program = export(wrapper, arguments, dynamic_shapes=shapes, strict=False)
    except RuntimeError as error:  # what torch.export raises when a branch hangs on data
        reason = str(error).partition("\n")[0]
        raise TraceError(f"graph {phase.name}: expected a model whose operations hang on no data: {reason}") from error
    return _Importer(model, phase, state_types, program).run()


def symbolic_states(model: Model, names: tuple[str, ...]) -> dict[str, TensorType]:
    """State types with dimensions S and C{ratio}."""
    types: dict[str, TensorType] = {}
    for name, (dtype, shape) in state_shapes(model.config, model.arithmetic, 1, 1).items():
        if name in names:
            concrete = type_of(torch.empty(shape, dtype=dtype, device="meta"))
            layer = name.split(".")[1]
            grows = name.endswith((".compressed", ".index_keys"))
            tail = (f"C{model.config.ratio(int(layer))}", shape[2]) if grows else shape[1:]
            types[name] = TensorType(concrete.dtype, ("S", *tail))
    return types


class _Importer:
    """Maps one exported program node by node."""

    def __init__(
        self, model: Model, phase: _Phase, state_types: dict[str, TensorType], program: ExportedProgram
    ) -> None:
        self.model, self.phase, self.state_types, self.program = model, phase, state_types, program
        self.builder = Builder(phase.name)
        self.values: dict[fx.Node, Value | tuple[Value, ...]] = {}
        self.states: dict[fx.Node, str] = {}

    def run(self) -> Graph:
        outputs, landmarks = self._outputs()
        named = [*outputs.items(), *landmarks.items()]
        self.names = {node: name for name, node in reversed(named)}  # the first name of a value wins
        self._placeholders()
        for node in self.program.graph.nodes:
            if node.op == "call_function":
                self._call(node)
        return self.builder.finish(*(self._value(node) for node in outputs.values()))

    def _outputs(self) -> tuple[dict[str, fx.Node], dict[str, fx.Node]]:
        """Graph outputs and landmarks by name, from the structure that the wrapper returned."""
        spec = self.program.call_spec.out_spec
        (output,) = (node for node in self.program.graph.nodes if node.op == "output")
        nested = torch.utils._pytree.tree_unflatten(list(output.args[0]), spec)
        return nested["outputs"], nested["record"]

    def _placeholders(self) -> None:
        specs = {spec.arg.name: spec for spec in self.program.graph_signature.input_specs}
        given = [("input", name) for name in self.phase.inputs] + [("state", name) for name in self.phase.states]
        ordered = iter(given)
        for node in self.program.graph.nodes:
            if node.op != "placeholder":
                continue
            spec = specs[node.name]
            if spec.kind == InputKind.USER_INPUT:
                kind, name = next(ordered)
                if kind == "input":
                    self.values[node] = self.builder.input(name, self.phase.inputs[name])
                else:
                    self.builder.state(name, self.state_types[name])
                    self.states[node] = name
            else:
                self.values[node] = self._weight(str(spec.target), node)

    def _weight(self, target: str, node: fx.Node) -> Value:
        name = target.removeprefix("model.")
        if name == "compressed_ids":
            return self.builder.weight(COMPRESSED_IDS, type_of(node.meta["val"]))
        return self.builder.weight(checkpoint_name(self.model, name), type_of(node.meta["val"]))

    def _value(self, node: fx.Node) -> Value:
        if node in self.states:
            return self.builder.current(self.states[node])
        value = self.values[node]
        if isinstance(value, tuple):
            raise TraceError(f"{node.name}: expected one value, got {len(value)}")
        return value

    def _call(self, node: fx.Node) -> None:
        if node.target is operator.getitem:
            source, index = node.args
            self.values[node] = self.values[source][index]  # type: ignore[index]
            return
        target = str(node.target)
        module = module_path(node)
        if target.startswith(f"{NAMESPACE}."):
            op_type = op_types()[target.split(".")[1]]
            count = len(op_type.operands())
            attributes = [f.name for f in node.target._schema.arguments[count:]]  # type: ignore[union-attr]
            op = op_type.from_attributes(dict(zip(attributes, node.args[count:], strict=True)))
            operands = node.args[:count]
        else:
            op, operands = import_aten(node, module)
        values = [None if operand is None else self._value(operand) for operand in operands]  # type: ignore[arg-type]
        results = self.builder.apply(op, *values, names=self._result_names(node, op, module), module=module)
        rest = results[len(op.states) :]
        self.values[node] = rest[0] if len(rest) == 1 else rest

    def _result_names(self, node: fx.Node, op: Any, module: str) -> tuple[str, ...]:
        """Landmark names where the model gave one, else module and operation."""
        stem = f"{module}.{op.name()}" if module else op.name()
        total = op.result_count()
        names = [stem] * total
        for index, declared in enumerate(op.states):
            operand = node.args[[o.name for o in op.operands()].index(declared)]
            names[index] = self.states[operand]  # type: ignore[index]
        if total - len(op.states) == 1:
            names[-1] = self.names.get(node, stem)
        for user in node.users:
            if user.target is operator.getitem and user in self.names:
                names[len(op.states) + int(user.args[1])] = self.names[user]  # type: ignore[arg-type]
        return tuple(names)


def module_path(node: fx.Node) -> str:
    """Path of the eager module that called the operation, as in the checkpoint's names."""
    stack = node.meta.get("nn_module_stack") or {}
    path = next(reversed(stack.values()))[0] if stack else ""
    return str(path).removeprefix("model").removeprefix(".")
