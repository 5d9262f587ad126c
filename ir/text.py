"""The text form of graphs: one line per value, printed from the dataclasses and parsed back to the same graph.

    graph decoder {
      input %tokens : i32[T]
      weight @norm.weight : bf16[192]
      state $layers.0.window : u8[S,32,66]
      (%x : bf16[T,192]) = rms_norm(%y, @norm.weight) {eps=1e-20} // layers.0 | trace
      final $layers.0.window = %layers.0.window.2
      output %x
    }

`%` marks inputs and results, `@` weights, `$` a state's first version, `_` an absent operand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from v41c.errors import VerifyError
from v41c.ir.graph import Graph, Module, Node, Origin, Value
from v41c.ir.op import Op
from v41c.ir.ops import op_types
from v41c.ir.types import Dim, DType, TensorType

_DECLARATION = re.compile(r"(input|weight|state) [%@$](\S+) : (\S+)")
_FINAL = re.compile(r"final \$(\S+) = [%$](\S+)")
_OUTPUT = re.compile(r"output [%@$](\S+)")
_NODE = re.compile(r"\((.*?)\) = (\w+)\(([^)]*)\) ?(\{.*\})? ?// (\S*) \| (\S*)")
_TYPE = re.compile(r"(\w+)\[(.*)\]")
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

    yield f"graph {graph.name} {{"
    for kind, group in (("input", graph.inputs), ("weight", graph.weights), ("state", graph.states)):
        for value in group:
            yield f"  {kind} {ref(value)} : {value.type}"
    for node in graph.nodes:
        results = ", ".join(f"{ref(value)} : {value.type}" for value in node.results)
        operands = ", ".join(ref(value) for value in node.operands)
        attributes = node.op.text()
        call = f"{node.op.name()}({operands})" + (f" {attributes}" if attributes else "")
        yield f"  ({results}) = {call} // {node.origin.module} | {node.origin.made_by}"
    for name, value in graph.finals.items():
        yield f"  final ${name} = {ref(value)}"
    for value in graph.outputs:
        yield f"  output {ref(value)}"
    yield "}"


def parse_module(text: str) -> Module:
    """The module printed as `text`; VerifyError names the line that does not parse."""
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    graphs: list[Graph] = []
    parser: _Parser | None = None
    for number, line in lines:
        if parser is None:
            found = re.fullmatch(r"graph (\S+) \{", line)
            if not found:
                raise VerifyError(f"line {number}: expected `graph NAME {{`, got `{line[:60]}`")
            parser = _Parser(found[1])
        elif line == "}":
            graphs.append(parser.finish())
            parser = None
        else:
            parser.line(number, line)
    if parser is not None:
        raise VerifyError(f"graph {parser.name}: expected `}}` at the end of the text")
    return Module(tuple(graphs))


class _Parser:
    def __init__(self, name: str) -> None:
        self.name = name
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
            self.nodes.append(Node(op, operands, results, Origin(found[5], found[6])))
        else:
            raise ValueError("not a declaration, operation, final or output")

    def define(self, name: str, type: str) -> Value:
        self.values[name] = Value(name, _parse_type(type))
        return self.values[name]

    def finish(self) -> Graph:
        declared = (tuple(self.declared[kind]) for kind in ("input", "weight", "state"))
        graph = Graph(self.name, *declared, tuple(self.nodes), tuple(self.outputs), self.finals)
        graph.verify()
        return graph


def _parse_type(text: str) -> TensorType:
    found = _TYPE.fullmatch(text)
    if not found:
        raise ValueError(f"not a type: {text}")
    dims: list[Dim] = [int(dim) if dim.isdigit() else dim for dim in filter(None, found[2].split(","))]
    return TensorType(DType(found[1]), tuple(dims))


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
