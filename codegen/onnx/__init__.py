"""Operations as local functions of an ONNX model, in standard operators: one file per operation, found by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec

from v41c.codegen.onnx.body import ELEMENT, Body, Callee, Term, Written, call_node, first_line
from v41c.errors import UnsupportedError
from v41c.ir.fused import FusedOp
from v41c.ir.op import Op


def apply(
    f: Body, op: Op, *operands: Term | None, names: Sequence[str] | None = None, facts: Mapping[str, str] | None = None
) -> tuple[Term, ...]:
    """The results of an operation, named `names`, by a call of its local function that carries `facts` as metadata.

    A file has `body(f, op, *terms)`, whose results are rounded to the types that the operation declares; a fused
    operation needs none and is written as the calls it is composed of. UnsupportedError names what has neither.
    """
    types = op.infer_results(tuple(None if term is None else term.type for term in operands))
    callee = _function(f, op, operands, [ELEMENT[type.dtype] for type in types])
    call = call_node(callee, operands)
    call.name = "" if names is None else names[-1]
    for key, text in (facts or {}).items():
        call.metadata_props.add(key=key, value=text)
    results = f.append(call, callee.results, names)
    return tuple(replace(term, type=type) for term, type in zip(results, types, strict=True))


def _function(f: Body, op: Op, operands: Sequence[Term | None], results: Sequence[int]) -> Callee:
    body = _body(op)
    named = {declared.name: term for declared, term in zip(op.operands(), operands, strict=True)}

    def write(g: Body, *terms: Term | None) -> Written:
        return body(g, op, *terms)

    return f.functions.define(op.name(), first_line(op), named, write, results)


def _body(op: Op) -> Callable[..., Written]:
    name = op.name()
    if find_spec(f"v41c.codegen.onnx.{name}") is not None:
        body: Callable[..., Written] = importlib.import_module(f"v41c.codegen.onnx.{name}").body
        return body
    if isinstance(op, FusedOp):
        return _composition
    raise UnsupportedError(f"{name} in ONNX: no function; expected codegen/onnx/{name}.py")


def _composition(f: Body, op: FusedOp, *operands: Term | None) -> tuple[Term, ...]:
    return op.compose(partial(apply, f), *(None if term is None else term.passable for term in operands))
