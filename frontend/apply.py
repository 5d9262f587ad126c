"""How the eager model uses an operation: its reference directly, or, while tracing, the same declaration as a torch op.

One declaration serves both. While tracing, operations are opaque torch operators whose schema is derived from the
declaration (operands from `infer`, attributes from the fields, written states as mutable operands) and whose shape
function is `infer` itself. A trace runs on fake tensors only; what `opaque` leaves out of torch.compile's graphs
computes with its reference.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from v41c.ir.op import Op
from v41c.ir.ops import op_types
from v41c.ir.torch_types import torch_dtype, type_of

NAMESPACE = "v41c"
_tracing = False
_opaque: frozenset[type[Op]] = frozenset()


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """Within this context, operations are recorded as torch operators instead of computed."""
    global _tracing
    _library()
    _tracing = True
    try:
        yield
    finally:
        _tracing = False


@contextlib.contextmanager
def opaque(left_out: frozenset[type[Op]]) -> Iterator[None]:
    """Within this context, these operations are single torch operators that call their references.

    torch.compile then sees one graph where their Python depends on data. What it compiled runs within the same set
    of operations only.
    """
    global _opaque
    for op_type in left_out:
        _give_kernel(op_type.name())
    _opaque = left_out
    try:
        yield
    finally:
        _opaque = frozenset()


def apply(op: Op, *operands: Tensor | None) -> Any:
    """The results of `op` that are not states: a tensor, a tuple of tensors, or None. States change in place."""
    if _tracing or type(op) in _opaque:
        return getattr(getattr(torch.ops, NAMESPACE), op.name())(*operands, *_flat_attributes(op))
    return _compute(op, *operands)


def _compute(op: Op, *operands: Tensor | None) -> Any:
    results = op.reference(*operands)
    if not op.states:
        return results
    rest = results[len(op.states) :] if isinstance(results, tuple) else ()
    return rest[0] if len(rest) == 1 else rest or None


def _flat_attributes(op: Op) -> list[Any]:
    return [list(value) if isinstance(value, tuple) else value for value in op.attributes().values()]


_SCHEMA_TYPES = {"int": "int", "float": "float", "bool": "bool", "str": "str", "tuple[int, ...]": "int[]"}


def schema(op_type: type[Op]) -> str:
    """The torch operator schema of an operation."""
    arguments = []
    for index, operand in enumerate(op_type.operands()):
        mutable = f"({chr(ord('a') + index)}!)" if operand.state else ""
        arguments.append(f"Tensor{mutable}{'?' if operand.optional else ''} {operand.name}")
    arguments += [f"{_SCHEMA_TYPES[str(field.type)]} {field.name}" for field in dataclasses.fields(op_type)]
    results = op_type.result_count() - len(op_type.states)
    returns = {0: "()", 1: "Tensor"}.get(results, f"({', '.join(['Tensor'] * results)})")
    return f"{op_type.name()}({', '.join(arguments)}) -> {returns}"


@cache
def _library() -> torch.library.Library:
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    for name, op_type in op_types().items():
        if not op_type.traced:
            continue
        # an attribute is named like an operand in no operation, so the schema's names are unique
        library.define(schema(op_type), tags=(torch.Tag.pt2_compliant_tag,))
        torch.library.register_fake(f"{NAMESPACE}::{name}", _fake(op_type), lib=library)
    return library


def _split(op_type: type[Op], arguments: tuple[Any, ...]) -> tuple[Op, tuple[Any, ...]]:
    """The operation and its operands, from the arguments of its torch operator."""
    operands, attributes = len(op_type.operands()), [field.name for field in dataclasses.fields(op_type)]
    return op_type.from_attributes(dict(zip(attributes, arguments[operands:], strict=True))), arguments[:operands]


@cache
def _give_kernel(name: str) -> None:
    op_type = op_types()[name]

    def compute(*arguments: Any) -> Any:
        op, operands = _split(op_type, arguments)
        return _compute(op, *operands)

    torch.library.impl(f"{NAMESPACE}::{name}", "CPU", compute, lib=_library())


def _fake(op_type: type[Op]) -> Any:
    def shapes(*arguments: Any) -> Any:
        op, given = _split(op_type, arguments)
        types = op.infer_results(tuple(None if tensor is None else type_of(tensor) for tensor in given))
        # while tracing, dimensions are torch's own symbolic sizes
        results = tuple(torch.empty(t.shape, dtype=torch_dtype(t.dtype)) for t in types[len(op.states) :])  # type: ignore[arg-type]
        return results[0] if len(results) == 1 else results or None

    return shapes
