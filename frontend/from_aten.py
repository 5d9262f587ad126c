"""The torch operators that may stand between semantic operations, as IR operations.

Everything else is refused: an unknown operator has no declared meaning, shape rule, cost or kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from v41c.errors import TraceError
from v41c.ir.op import Op
from v41c.ir.ops.add import Add
from v41c.ir.ops.concat import Concat
from v41c.ir.ops.reshape import Reshape
from v41c.ir.torch_types import type_of

Imported = tuple[Op, tuple[Any, ...]]


def _reshape(node: fx.Node) -> Imported:
    return Reshape(tuple(int(dim) for dim in node.meta["val"].shape[1:])), node.args[:1]


def _add(node: fx.Node) -> Imported:
    return Add(str(type_of(node.meta["val"]).dtype)), node.args[:2]


def _concat(node: fx.Node) -> Imported:
    return Concat(), tuple(node.args[0])  # type: ignore[arg-type]


_TABLE: dict[str, Callable[[fx.Node], Imported]] = {
    "aten.view.default": _reshape,
    "aten.reshape.default": _reshape,
    "aten.unflatten.int": _reshape,
    "aten.flatten.using_ints": _reshape,
    "aten.add.Tensor": _add,
    "aten.cat.default": _concat,
}


def import_aten(node: fx.Node, module: str) -> Imported:
    """The IR operation and operands of a torch operator; TraceError names one that is not in the table."""
    target = str(node.target)
    if target not in _TABLE:
        known = ", ".join(sorted(_TABLE))
        expected = f"expected an operation of v41c.ir.ops or {known}"
        raise TraceError(f"{module or 'model'}: unknown operation {target}: {expected}")
    return _TABLE[target](node)
