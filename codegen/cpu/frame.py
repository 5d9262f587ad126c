"""The function of an operation: its arguments as `CpuKernel` lays them down, as buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tvm.script.ir_builder import tirx as T

from v41c.codegen.cpu.tir import STORAGE, Buffer, Expr, Function, flat, function
from v41c.codegen.kernel import CpuKernel, kernel_symbol
from v41c.ir.types import Dim, TensorType

if TYPE_CHECKING:
    from v41c.ir.op import Op


class Body:
    """Arguments of the kernel under construction, as flat buffers.

    `operands` and `results` follow the operation; an absent operand is None and states are operands only. `words` and
    `integers` are the f32 and the i32 view of the workspace, of which a kernel uses disjoint parts.
    """

    def __init__(self, made: Function, operands: Sequence[TensorType | None], results: Sequence[TensorType]) -> None:
        buffers = made.buffers
        self.operands: list[Buffer] = [buffers.get(f"operand{i}") for i in range(len(operands))]
        self.results: list[Buffer] = [buffers[f"result{i}"] for i in range(len(results))]
        self.words: Buffer = buffers.get("workspace")
        self.integers: Buffer = None if self.words is None else flat(self.words.data, "int32")
        self._sizes = made.scalars

    def size(self, dim: Dim) -> Expr:
        """A dimension as a 64-bit expression."""
        return self._sizes[dim] if isinstance(dim, str) else T.int64(dim)


def build_kernel(
    emit: Callable[[Body], None],
    op: Op,
    operands: Sequence[TensorType | None],
    results: Sequence[TensorType],
    bounds: Mapping[str, int],
    *,
    scratch_words: int = 0,
    layouts: Mapping[int, str] | None = None,
    storage: Mapping[int, str] | None = None,
) -> CpuKernel:
    """The kernel whose statements `emit` will write, with `scratch_words` four-byte words of workspace.

    `layouts` names the layouts of packed weights by operand index, `storage` the TIR dtype their elements then have.
    """
    symbol = kernel_symbol(op, operands, results, bounds)
    outputs = results[len(op.states) :]
    dtypes = {i: STORAGE[kind.dtype] for i, kind in enumerate(operands) if kind is not None} | dict(storage or {})
    pointers = {f"operand{i}": dtypes[i] for i in sorted(dtypes)}
    pointers |= {f"result{i}": STORAGE[kind.dtype] for i, kind in enumerate(outputs)}
    if scratch_words:
        pointers["workspace"] = "float32"
    kinds = [kind for kind in (*operands, *outputs) if kind is not None]
    dims = tuple(dict.fromkeys(name for kind in kinds for name in kind.symbols))

    def write() -> Any:
        with function(symbol, pointers, dims) as made:
            emit(Body(made, operands, outputs))
        return made.primfunc

    return CpuKernel(symbol, write, dims, 4 * scratch_words, layouts or {})


def bound_of(dim: Dim, bounds: Mapping[str, int]) -> int:
    """The largest value of a dimension."""
    return bounds[dim] if isinstance(dim, str) else dim
