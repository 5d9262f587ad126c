"""Putting a kernel together: names for its buffers, dimensions, scratch memory, and launches over them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from v41c.codegen.cuda.kernel import TRITON_TYPES, Axis, Constant, CudaKernel, Function, Launch, Parameter
from v41c.codegen.kernel import kernel_symbol
from v41c.ir.op import Op
from v41c.ir.types import TensorType

#: workspaces and the parts of them start at multiples of this many bytes
ALIGNMENT_BYTES = 64
_ELEMENT_BYTES = {"fp32": 4, "i32": 4, "bf16": 2, "i64": 8, "u8": 1}


@dataclass(frozen=True)
class Buffer:
    """A buffer of a kernel as its launches see it: where it is among the arguments, and Triton's element type."""

    place: str
    element: str
    offset: int = 0

    def at(self, elements: int) -> Buffer:
        """The buffer from an element on, which must lie at a multiple of 16 bytes."""
        return replace(self, offset=self.offset + elements * _ELEMENT_BYTES[self.element])

    def cast(self, element: str) -> Buffer:
        """The same bytes as another element type."""
        return replace(self, element=element)


@dataclass(frozen=True)
class Extent:
    """A symbolic dimension as a parameter."""

    name: str


#: what a launch passes to its function, by parameter
Arguments = dict[str, Buffer | Extent | Constant]


@dataclass
class Frame:
    """The kernel of one operation in the making. `bounds` are the largest values of symbolic dimensions."""

    op: Op
    operands: Sequence[TensorType | None]
    results: Sequence[TensorType]
    bounds: Mapping[str, int]
    _launches: list[Launch] = field(default_factory=list)
    _workspace_bytes: int = 0
    _counter_bytes: int = 0

    def operand(self, name: str) -> Buffer | None:
        """The buffer of an operand by its declared name, None where it is absent."""
        for declared, kind in zip(self.op.operands(), self.operands, strict=True):
            if declared.name == name:
                return None if kind is None else Buffer(name, TRITON_TYPES[kind.dtype])
        raise KeyError(f"{self.op.name()} has no operand {name}")

    def type_of(self, name: str) -> TensorType:
        """The type of a present operand."""
        for declared, kind in zip(self.op.operands(), self.operands, strict=True):
            if declared.name == name and kind is not None:
                return kind
        raise KeyError(f"{self.op.name()} has no operand {name}")

    def result(self, index: int) -> Buffer:
        """The buffer of a result that is no state, counted without the states."""
        kind = self.results[len(self.op.states) + index]
        return Buffer(f"result {index}", TRITON_TYPES[kind.dtype])

    def workspace(self, elements: int, element: str) -> Buffer:
        """Scratch memory for one run of the kernel, full of anything."""
        buffer = Buffer("workspace", element, self._workspace_bytes)
        self._workspace_bytes += _aligned(elements * _ELEMENT_BYTES[element])
        return buffer

    def counters(self, count: int) -> Buffer:
        """i32 counters that are zero before the kernel, and that it must leave zero."""
        buffer = Buffer("counters", "i32", self._counter_bytes)
        self._counter_bytes += _aligned(4 * count)
        return buffer

    def bound(self, dim: int | str) -> int:
        """The largest value of a dimension."""
        return self.bounds[dim] if isinstance(dim, str) else dim

    def extent(self, dim: int | str) -> Extent | int:
        """A dimension as launches take it: symbolic, or the number it is."""
        return Extent(dim) if isinstance(dim, str) else dim

    def tiles(self, dim: int | str, tile: int = 1, count: int = 1) -> Axis:
        """An axis of the grid: `count` blocks for every `tile` of a dimension."""
        return Axis(count, dim, tile) if isinstance(dim, str) else Axis(count * -(-dim // tile))

    def launch(
        self,
        function: Callable[..., None],
        arguments: Mapping[str, Buffer | Extent | Constant],
        grid: Sequence[Axis | int],
        *,
        warps: int = 4,
        stages: int = 2,
    ) -> None:
        """Add a launch of a Triton function; `arguments` by the names of its parameters.

        Buffers and dimensions become runtime parameters, buffers aligned to 16 bytes; everything else is constant.
        """
        source = _source(function)
        names = list(inspect.signature(source).parameters)
        if set(names) != set(arguments):
            raise KeyError(f"{source.__name__}: arguments: expected {sorted(names)}, got {sorted(arguments)}")
        parameters: list[Parameter] = []
        constants: dict[str, Constant] = {}
        for name in names:
            value = arguments[name]
            if isinstance(value, Buffer):
                parameters.append(Parameter(name, value.place, f"*{value.element}", value.offset))
            elif isinstance(value, Extent):
                parameters.append(Parameter(name, value.name, "i32"))
            else:
                constants[name] = value
        types = tuple((parameter.name, parameter.type) for parameter in parameters)
        made = Function(source.__module__, source.__name__, types, constants, warps, stages)
        axes = [*map(_axis, grid), *[Axis()] * (3 - len(grid))]
        self._launches.append(Launch(made, tuple(parameters), (axes[0], axes[1], axes[2])))

    def kernel(self, layouts: Mapping[int, str] | None = None) -> CudaKernel:
        """The finished kernel."""
        used = {axis.dim for launch in self._launches for axis in launch.grid}
        used |= {parameter.argument for launch in self._launches for parameter in launch.parameters}
        types = [kind for kind in (*self.operands, *self.results) if kind is not None]
        dims = tuple(dict.fromkeys(name for kind in types for name in kind.symbols if name in used))
        present = zip(self.op.operands(), self.operands, strict=True)
        results = len(self.results) - len(self.op.states)
        arguments = [
            *(declared.name for declared, kind in present if kind is not None),
            *(f"result {index}" for index in range(results)),
            *(("workspace",) if self._workspace_bytes else ()),
            *(("counters",) if self._counter_bytes else ()),
            *dims,
        ]
        return CudaKernel(
            symbol=kernel_symbol(self.op, self.operands, self.results, self.bounds),
            arguments=tuple(arguments),
            launches=tuple(self._launches),
            dims=dims,
            workspace_bytes=self._workspace_bytes,
            counter_bytes=self._counter_bytes,
            layouts=layouts or {},
        )


def _axis(size: Axis | int) -> Axis:
    return size if isinstance(size, Axis) else Axis(size)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _source(function: Callable[..., None]) -> Callable[..., None]:
    """The Python function behind what Triton made of it."""
    source: Callable[..., None] = function.fn  # type: ignore[attr-defined]
    return source
