"""Local functions of an ONNX model, written as expressions: `f.Relu(x)`, `x.wide * 2.0 + f.Unsqueeze(y, [-1])`."""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper

from v41c.ir.types import Dim, DType, TensorType

DOMAIN = "v41c"
#: the first operator set whose Cast rounds to e8m0
OPSET = 24
#: the format version of the ONNX release that brought this operator set
IR_VERSION = 12

#: ONNX has packed fp4 as well, but no runtime that computes with it: two elements a byte are bytes
ELEMENT: Mapping[DType, int] = {
    DType.F32: TensorProto.FLOAT,
    DType.BF16: TensorProto.BFLOAT16,
    DType.F8E4M3: TensorProto.FLOAT8E4M3FN,
    DType.F4E2M1: TensorProto.UINT8,
    DType.E8M0: TensorProto.FLOAT8E8M0,
    DType.I32: TensorProto.INT32,
    DType.I64: TensorProto.INT64,
    DType.BOOL: TensorProto.BOOL,
    DType.U8: TensorProto.UINT8,
}
F32, I64, U8, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.UINT8, TensorProto.BOOL
F8E4M3, E8M0 = TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT8E8M0
_WIDE = {TensorProto.BFLOAT16: F32, F8E4M3: F32, E8M0: F32, TensorProto.INT32: I64, U8: I64}
_PREDICATES = ("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "And", "Or", "Not")

Array = npt.NDArray[Any]


def opset_imports() -> list[Any]:
    """The operator sets of the model and of each of its functions."""
    return [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)]


@dataclass(frozen=True, eq=False)
class Term:
    """A value: its name, its ONNX element type and, of operands and results of operations, its type in the IR."""

    body: Body
    name: str
    dtype: int
    type: TensorType | None = None

    @property
    def shape(self) -> tuple[Dim, ...]:
        """The shape, of operands and results of operations."""
        return () if self.type is None else self.type.shape

    @property
    def wide(self) -> Term:
        """The same numbers in the type that arithmetic is done in: floats as f32, integers as i64."""
        return self.to(_WIDE.get(self.dtype, self.dtype))

    @property
    def passable(self) -> Term:
        """The same numbers as an operand of another function: ONNX Runtime lets a function pass on no fp8."""
        return replace(self.wide, type=self.type) if self.dtype in (F8E4M3, E8M0) else self

    def to(self, dtype: int) -> Term:
        """Rounded to another element type."""
        return self if self.dtype == dtype else self.body.Cast(self, to=dtype)

    def __add__(self, other: Operand) -> Term:
        return self.body.Add(self, other)

    def __radd__(self, other: Operand) -> Term:
        return self.body.Add(other, self)

    def __sub__(self, other: Operand) -> Term:
        return self.body.Sub(self, other)

    def __rsub__(self, other: Operand) -> Term:
        return self.body.Sub(other, self)

    def __mul__(self, other: Operand) -> Term:
        return self.body.Mul(self, other)

    def __rmul__(self, other: Operand) -> Term:
        return self.body.Mul(other, self)

    def __truediv__(self, other: Operand) -> Term:
        return self.body.Div(self, other)

    def __floordiv__(self, other: Operand) -> Term:
        """Of integers that are not negative: ONNX rounds towards zero."""
        return self.body.Div(self, other)

    def __mod__(self, other: Operand) -> Term:
        """Of integers; the sign is the divisor's."""
        return self.body.Mod(self, other)

    def __neg__(self) -> Term:
        return self.body.Neg(self)

    def __lt__(self, other: Term | float) -> Term:
        return self.body.Less(self, other)

    def __le__(self, other: Term | float) -> Term:
        return self.body.LessOrEqual(self, other)

    def __gt__(self, other: Term | float) -> Term:
        return self.body.Greater(self, other)

    def __ge__(self, other: Term | float) -> Term:
        return self.body.GreaterOrEqual(self, other)

    def __and__(self, other: Operand) -> Term:
        return self.body.And(self, other)

    def __or__(self, other: Operand) -> Term:
        return self.body.Or(self, other)


#: what operators take: a float is f32, an integer i64, a list of integers i64 [n]
Operand = Term | Array | float | list[int]
Written = Term | tuple[Term, ...]


@dataclass
class _Scope:
    """The nodes of a function or of a loop's body, and what was already computed there by the node that does it."""

    nodes: list[Any] = field(default_factory=list)
    made: dict[bytes, tuple[Term, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Callee:
    """A local function and the element types of its results."""

    proto: Any
    results: tuple[int, ...]


class Functions:
    """The local functions of a model, named `rope`, `rope_2`, … where bodies differ.

    ONNX has overloads for that, but ONNX Runtime calls the first one whenever the caller is a function itself.
    """

    def __init__(self) -> None:
        self.protos: list[Any] = []
        self._known: dict[tuple[str, bytes], Callee] = {}
        self._counts: Counter[str] = Counter()

    def define(
        self,
        name: str,
        doc: str,
        operands: Mapping[str, Term | None],
        write: Callable[..., Written],
        results: Sequence[int] | None = None,
    ) -> Callee:
        """The function that `write(f, *terms)` writes for operands like these; None is an absent one.

        Its results are rounded to the element types `results`, if given.
        """
        f = Body(self)
        terms = [None if given is None else replace(given, body=f, name=formal) for formal, given in operands.items()]
        written = write(f, *terms)
        outputs = written if isinstance(written, tuple) else (written,)
        if results is not None:
            outputs = tuple(output.to(dtype) for output, dtype in zip(outputs, results, strict=True))
        inputs = [term.name for term in terms if term is not None]
        outputs = f.produced(outputs)
        proto = helper.make_function(
            DOMAIN, name, inputs, [output.name for output in outputs], f.nodes, opset_imports(), doc_string=doc
        )
        return self._shared(proto, tuple(output.dtype for output in outputs))

    def _shared(self, proto: Any, results: tuple[int, ...]) -> Callee:
        unnamed = onnx.FunctionProto(input=proto.input, output=proto.output, node=proto.node)
        key = (proto.name, unnamed.SerializeToString(deterministic=True))
        if key not in self._known:
            self._known[key] = Callee(proto, results)
            self.protos.append(proto)
            self._counts[proto.name] += 1
            if self._counts[proto.name] > 1:
                proto.name += f"_{self._counts[proto.name]}"
        return self._known[key]


class Body:
    """What is being written: the body of a function, or a graph.

    Every operator is a method that takes its inputs and attributes and gives its first output; `many` gives all of
    them. What was computed before is not computed again.
    """

    def __init__(self, functions: Functions) -> None:
        self.functions = functions
        self._scopes = [_Scope()]
        self._names: Counter[str] = Counter()

    @property
    def nodes(self) -> list[Any]:
        """What was written, outside of loops."""
        return self._scopes[0].nodes

    def __getattr__(self, op_type: str) -> Callable[..., Term]:
        if not op_type[0].isupper():
            raise AttributeError(op_type)
        return partial(self._first, op_type)

    def _first(self, op_type: str, *inputs: Operand | None, **attributes: Any) -> Term:
        return self.many(op_type, 1, *inputs, **attributes)[0]

    def many(self, op_type: str, outputs: int, *inputs: Operand | None, **attributes: Any) -> tuple[Term, ...]:
        """All outputs of an operator."""
        terms = [None if value is None else self.term(value) for value in inputs]
        first = next((term.dtype for term in terms if term is not None), F32)
        dtypes = [first] * outputs
        if op_type == "Cast":
            dtypes[0] = attributes["to"]
        elif op_type in _PREDICATES:
            dtypes[0] = BOOL
        elif op_type in ("Shape", "ArgMax"):
            dtypes[0] = I64
        elif op_type == "Where":
            dtypes[0] = terms[1].dtype  # type: ignore[union-attr]  # Where has three inputs
        elif op_type == "TopK":
            dtypes[1] = I64
        return self._written(helper.make_node(op_type, _names(terms), [], **attributes), dtypes)

    def _written(self, node: Any, dtypes: Sequence[int]) -> tuple[Term, ...]:
        """Results of a node without outputs: those of an equal one that is there, else its own."""
        key = node.SerializeToString(deterministic=True)
        for scope in self._scopes:
            if key in scope.made:
                return scope.made[key]
        self._scopes[-1].made[key] = terms = self.append(node, dtypes)
        return terms

    def append(self, node: Any, dtypes: Sequence[int], names: Sequence[str] | None = None) -> tuple[Term, ...]:
        """Write a node without outputs and give it some, named `names`."""
        names = names or [self.name(node.op_type) for _ in dtypes]
        node.output.extend(names)
        self._scopes[-1].nodes.append(node)
        return tuple(Term(self, name, dtype) for name, dtype in zip(names, dtypes, strict=True))

    def name(self, stem: str) -> str:
        """A name that nothing else has."""
        self._names[stem] += 1
        return f"{stem}_{self._names[stem]}"

    def term(self, value: Operand) -> Term:
        """A term as it is, numbers as a constant."""
        if isinstance(value, Term):
            return value
        dtype = np.float32 if isinstance(value, float) else np.int64
        array = value if isinstance(value, np.ndarray) else np.array(value, dtype)
        tensor = onnx.numpy_helper.from_array(array)
        node = helper.make_node("Constant", [], [], value=tensor)
        key, outermost = node.SerializeToString(deterministic=True), self._scopes[0]
        if key not in outermost.made:
            # a constant that a loop's body asks for first stands before the loop
            inner, self._scopes = self._scopes, [outermost]
            outermost.made[key] = self.append(node, [tensor.data_type])
            self._scopes = inner
        return outermost.made[key][0]

    def call(self, write: Callable[..., Written], *operands: Term | None, **attributes: Any) -> Term:
        """A call of the local function that `write(f, *operands, **attributes)` writes, of one result.

        It is named after `write` and those attributes that are text.
        """
        name = "_".join([write.__name__, *(value for value in attributes.values() if isinstance(value, str))])
        formals = list(inspect.signature(write).parameters)[1:]
        named = dict(zip(formals, operands, strict=False))
        callee = self.functions.define(name, first_line(write), named, partial(write, **attributes))
        return self._written(call_node(callee, operands), callee.results)[0]

    def scan(
        self, step: Callable[..., tuple[Term, ...]], states: Sequence[Term], inputs: Sequence[Term]
    ) -> tuple[Term, ...]:
        """A loop over the first axis of `inputs`: the last states, then what each step gives beside them, stacked.

        `step(*states, *slices)` gives the next states, then the rest.
        """
        graph, dtypes = self._loop_body([(term.name, term.dtype) for term in (*states, *inputs)], step)
        node = helper.make_node("Scan", _names([*states, *inputs]), [], body=graph, num_scan_inputs=len(inputs))
        return self.append(node, dtypes)

    def repeat(self, count: int, step: Callable[[Term], Term], state: Term) -> Term:
        """`step` applied `count` times."""
        formals = [("iteration", I64), ("condition", BOOL), (state.name, state.dtype)]
        graph, dtypes = self._loop_body(formals, lambda _, condition, value: (condition, step(value)))
        for scalar in graph.input[:2]:
            scalar.type.tensor_type.shape.SetInParent()
        node = helper.make_node("Loop", [self.term(count).name, "", state.name], [], body=graph)
        return self.append(node, dtypes[1:])[0]

    def _loop_body(
        self, formals: Sequence[tuple[str, int]], step: Callable[..., tuple[Term, ...]]
    ) -> tuple[Any, list[int]]:
        terms = [Term(self, self.name(f"each_{name}"), dtype) for name, dtype in formals]
        self._scopes.append(_Scope())
        outputs = self.produced(step(*terms))
        graph = helper.make_graph(self._scopes.pop().nodes, "step", _infos(terms), _infos(outputs))
        return graph, [output.dtype for output in outputs]

    def produced(self, outputs: Sequence[Term]) -> tuple[Term, ...]:
        """Terms as results: one that no node of this scope makes, or that is listed twice, is copied."""
        made = {name for node in self._scopes[-1].nodes for name in node.output}
        results: list[Term] = []
        for output in outputs:
            if output.name in made:
                made.remove(output.name)
                results.append(output)
            else:
                results.extend(self.append(helper.make_node("Identity", [output.name], []), [output.dtype]))
        return tuple(results)

    def arange(self, count: Term) -> Term:
        """i64 [count]: 0, 1, … for a count of shape [1]."""
        return self.Range(0, self.Squeeze(count), 1)

    def full(self, value: float, *shape: Term | list[int]) -> Term:
        """f32 of a shape given in parts."""
        return self.Expand(value, self.Concat(*shape, axis=0))

    def split_last(self, x: Term, size: int) -> Term:
        """[…, K] as […, K / size, size]."""
        return self.Reshape(x, self.Concat(self.Shape(x, end=-1), [-1, size], axis=0))

    def join_last(self, x: Term) -> Term:
        """[…, A, B] as […, A · B]."""
        return self.Reshape(x, self.Concat(self.Shape(x, end=-2), [-1], axis=0))

    def stack_last(self, *parts: Term) -> Term:
        """[…, n] of n terms […]."""
        return self.Concat(*(self.Unsqueeze(part, [-1]) for part in parts), axis=-1)

    def column(self, x: Term) -> Term:
        """[T] as [T, 1]."""
        return self.Unsqueeze(x, [1])

    def sign_bit(self, x: Term) -> Term:
        """Whether the sign bit is set, of −0.0 too: its reciprocal is −∞."""
        return (x < 0.0) | (self.Reciprocal(x) < 0.0)


def call_node(callee: Callee, operands: Sequence[Term | None]) -> Any:
    """A call of a local function, still without outputs; absent operands are no inputs of the function."""
    inputs = [term.name for term in operands if term is not None]
    return helper.make_node(callee.proto.name, inputs, [], domain=DOMAIN)


def first_line(documented: object) -> str:
    """The first line of a docstring."""
    return (documented.__doc__ or "").strip().partition("\n")[0]


def tensor_shape(type: TensorType) -> list[Dim]:
    """The shape in which ONNX has a tensor: packed fp4 counts bytes."""
    shape = list(type.shape)
    return [*shape[:-1], math.ceil(int(shape[-1]) / 2)] if type.dtype == DType.F4E2M1 else shape


def _names(terms: Sequence[Term | None]) -> list[str]:
    return ["" if term is None else term.name for term in terms]


def _infos(terms: Sequence[Term]) -> list[Any]:
    return [helper.make_tensor_value_info(term.name, term.dtype, None) for term in terms]
