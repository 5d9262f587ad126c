"""How the eager model uses an operation: its reference directly, or, while tracing, the same declaration as a torch op.

One declaration serves both. While tracing, operations are opaque torch operators whose schema is derived from the
declaration (operands from `infer`, attributes from the fields, written states as mutable operands) and whose shape
function is `infer` itself. They have no kernel: a trace runs on fake tensors only.
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


def apply(op: Op, *operands: Tensor | None) -> Any:
    """The results of `op` that are not states: a tensor, a tuple of tensors, or None. States change in place."""
    if _tracing:
        return getattr(getattr(torch.ops, NAMESPACE), op.name())(*operands, *_flat_attributes(op))
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
        # an attribute is named like an operand in no operation, so the schema's names are unique
        library.define(schema(op_type), tags=(torch.Tag.pt2_compliant_tag,))
        torch.library.register_fake(f"{NAMESPACE}::{name}", _fake(op_type), lib=library)
    return library


def _fake(op_type: type[Op]) -> Any:
    operands, attributes = len(op_type.operands()), [field.name for field in dataclasses.fields(op_type)]

    def shapes(*arguments: Any) -> Any:
        values = dict(zip(attributes, arguments[operands:], strict=True))
        op = op_type.from_attributes(values)
        given = arguments[:operands]
        types = op.infer_results(tuple(None if tensor is None else type_of(tensor) for tensor in given))
        # while tracing, dimensions are torch's own symbolic sizes
        results = tuple(torch.empty(t.shape, dtype=torch_dtype(t.dtype)) for t in types[len(op.states) :])  # type: ignore[arg-type]
        return results[0] if len(results) == 1 else results or None

    return shapes
