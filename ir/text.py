"""The text form of graphs: one line per value, printed from the dataclasses and parsed back to the same graph.

    graph decoder {
      input %tokens : i32[T]
      weight @norm.weight : bf16[192]
      state $layers.0.window : u8[S,32,66]
      (%x : bf16[T,192]) = rms_norm(%y, @norm.weight) {eps=1e-20} // layers.0 | trace
      final $layers.0.window = %layers.0.window.2
      output %x
    }

After kernels are selected the first line carries the bounds, `graph decoder (T<=512, S<=1) {`, and a node its kernel,
`| symbol`, and `,aside` behind it if it runs beside what follows; after memory is planned values carry `@offset` behind
their type and kernels `+bytes@offset` of workspace.
`%` marks inputs and results, `@` weights, `$` a state's first version, `_` an absent operand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from v41c.errors import VerifyError
from v41c.ir.graph import Graph, Module, Node, Origin, Selected, Value
from v41c.ir.op import Op
from v41c.ir.ops import op_types
from v41c.ir.types import Dim, DType, TensorType

_HEAD = re.compile(r"graph (\S+)(?: \((.*)\))? \{")
_DECLARATION = re.compile(r"(input|weight|state) [%@$](\S+) : (.+)")
_FINAL = re.compile(r"final \$(\S+) = [%$](\S+)")
_OUTPUT = re.compile(r"output [%@$](\S+)")
_NODE = re.compile(r"\((.*?)\) = (\w+)\(([^)]*)\) ?(\{.*\})? ?// (\S*) \| (\S*)(?: \| (\S+))?")
_TYPE = re.compile(r"(\w+)\[(.*)\](?: @(\d+))?")
_KERNEL = re.compile(r"(\w+)(?:\+(\d+))?(?:@(\d+))?(,aside)?")
_ATTRIBUTE = re.compile(r"(\w+)=")


def print_module(module: Module) -> str:
    """Text of every graph."""
    return "\n".join(print_graph(graph) for graph in module)


def print_graph(graph: Graph) -> str:
    """Text of one graph."""
    return "\n".join(_lines(graph)) + "\n"


def _lines(graph: Graph) -> Iterator[str]:
    sigils = {value: "%" for value in graph.inputs}
    sigils |= {value: "@" for value in graph.weights}
    sigils |= {value: "$" for value in graph.states}

    def ref(value: Value | None) -> str:
        return "_" if value is None else sigils.get(value, "%") + value.name

    bounds = ", ".join(f"{name}<={bound}" for name, bound in graph.bounds.items())
    yield f"graph {graph.name} ({bounds}) {{" if bounds else f"graph {graph.name} {{"
    for kind, group in (("input", graph.inputs), ("weight", graph.weights), ("state", graph.states)):
        for value in group:
            yield f"  {kind} {ref(value)} : {_typed(value)}"
    for node in graph.nodes:
        results = ", ".join(f"{ref(value)} : {_typed(value)}" for value in node.results)
        operands = ", ".join(ref(value) for value in node.operands)
        attributes = node.op.text()
        call = f"{node.op.name()}({operands})" + (f" {attributes}" if attributes else "")
        yield f"  ({results}) = {call} // {node.origin.module} | {node.origin.made_by}{_kernel(node.kernel)}"
    for name, value in graph.finals.items():
        yield f"  final ${name} = {ref(value)}"
    for value in graph.outputs:
        yield f"  output {ref(value)}"
    yield "}"


def _typed(value: Value) -> str:
    return str(value.type) if value.offset is None else f"{value.type} @{value.offset}"


def _kernel(kernel: Selected | None) -> str:
    if kernel is None:
        return ""
    size = f"+{kernel.workspace_bytes}" if kernel.workspace_bytes else ""
    place = "" if kernel.workspace_offset is None else f"@{kernel.workspace_offset}"
    return f" | {kernel.symbol}{size}{place}" + (",aside" if kernel.aside else "")


def parse_module(text: str) -> Module:
    """The module printed as `text`; VerifyError names the line that does not parse."""
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    graphs: list[Graph] = []
    parser: _Parser | None = None
    for number, line in lines:
        if parser is None:
            found = _HEAD.fullmatch(line)
            if not found:
                raise VerifyError(f"line {number}: expected `graph NAME {{`, got `{line[:60]}`")
            parser = _Parser(found[1], found[2] or "")
        elif line == "}":
            graphs.append(parser.finish())
            parser = None
        else:
            parser.line(number, line)
    if parser is not None:
        raise VerifyError(f"graph {parser.name}: expected `}}` at the end of the text")
    return Module(tuple(graphs))


class _Parser:
    def __init__(self, name: str, bounds: str) -> None:
        self.name = name
        pairs = (entry.split("<=") for entry in filter(None, bounds.split(", ")))
        self.bounds = {dim: int(bound) for dim, bound in pairs}
        self.declared: dict[str, list[Value]] = {"input": [], "weight": [], "state": []}
        self.nodes: list[Node] = []
        self.outputs: list[Value] = []
        self.finals: dict[str, Value] = {}
        self.values: dict[str, Value] = {}

    def line(self, number: int, line: str) -> None:
        try:
            self._line(line)
        except (KeyError, ValueError) as error:
            raise VerifyError(f"line {number}: {error}: `{line[:80]}`") from None

    def _line(self, line: str) -> None:
        if found := _DECLARATION.fullmatch(line):
            self.declared[found[1]].append(self.define(found[2], found[3]))
        elif found := _FINAL.fullmatch(line):
            self.finals[found[1]] = self.values[found[2]]
        elif found := _OUTPUT.fullmatch(line):
            self.outputs.append(self.values[found[1]])
        elif found := _NODE.fullmatch(line):
            operands = tuple(None if ref == "_" else self.values[ref[1:]] for ref in filter(None, found[3].split(", ")))
            typed = [entry.split(" : ") for entry in found[1].split(", ")]
            results = tuple(self.define(ref[1:], type) for ref, type in typed)
            op = _parse_op(found[2], found[4] or "{}")
            kernel = _parse_kernel(found[7]) if found[7] else None
            self.nodes.append(Node(op, operands, results, Origin(found[5], found[6]), kernel))
        else:
            raise ValueError("not a declaration, operation, final or output")

    def define(self, name: str, type: str) -> Value:
        self.values[name] = Value(name, *_parse_type(type))
        return self.values[name]

    def finish(self) -> Graph:
        inputs, weights, states = (tuple(self.declared[kind]) for kind in ("input", "weight", "state"))
        nodes, outputs = tuple(self.nodes), tuple(self.outputs)
        graph = Graph(self.name, inputs, weights, states, nodes, outputs, self.finals, self.bounds)
        graph.verify()
        return graph


def _parse_kernel(text: str) -> Selected:
    found = _KERNEL.fullmatch(text)
    if not found:
        raise ValueError(f"not a kernel: {text}")
    return Selected(found[1], int(found[2] or 0), None if found[3] is None else int(found[3]), bool(found[4]))


def _parse_type(text: str) -> tuple[TensorType, int | None]:
    found = _TYPE.fullmatch(text)
    if not found:
        raise ValueError(f"not a type: {text}")
    dims: list[Dim] = [int(dim) if dim.isdigit() else dim for dim in filter(None, found[2].split(","))]
    return TensorType(DType(found[1]), tuple(dims)), None if found[3] is None else int(found[3])


def _parse_op(name: str, attributes: str) -> Op:
    if name not in op_types():
        raise ValueError(f"unknown operation {name}")
    decoder = json.JSONDecoder()
    values: dict[str, object] = {}
    position = 1
    while found := _ATTRIBUTE.match(attributes, position):
        values[found[1]], position = decoder.raw_decode(attributes, found.end())
        position += 2
    return op_types()[name].from_attributes(values)
