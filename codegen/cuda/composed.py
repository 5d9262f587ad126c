"""A fused operation without a kernel of its own: the launches of its parts, and a workspace for what is in between."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from v41c.codegen.cuda.frame import ALIGNMENT_BYTES
from v41c.codegen.cuda.kernel import CudaKernel, Launch
from v41c.codegen.kernel import kernel_symbol
from v41c.ir.fused import FusedOp
from v41c.ir.graph import Graph, Node
from v41c.ir.op import Op
from v41c.ir.types import TensorType

KernelOf = Callable[[Op, tuple[TensorType | None, ...], tuple[TensorType, ...]], CudaKernel]


def compose(
    op: FusedOp,
    operands: Sequence[TensorType | None],
    results: Sequence[TensorType],
    bounds: Mapping[str, int],
    kernel_of: KernelOf,
) -> CudaKernel:
    """The kernel of a fused operation from the kernels of its parts."""
    graph = op.parts(*operands)
    composition = _Composition(graph, len(op.states), bounds, kernel_of)
    for node in graph.nodes:
        composition.add(node)
    present = [declared.name for declared, kind in zip(op.operands(), operands, strict=True) if kind is not None]
    named = [f"result {index}" for index in range(len(results) - len(op.states))]
    scratch = ["workspace"] * bool(composition.workspace_bytes) + ["counters"] * bool(composition.counter_bytes)
    return CudaKernel(
        symbol=kernel_symbol(op, operands, results, bounds),
        arguments=(*present, *named, *scratch, *composition.dims),
        launches=tuple(composition.launches),
        dims=tuple(composition.dims),
        workspace_bytes=composition.workspace_bytes,
        counter_bytes=composition.counter_bytes,
    )


@dataclass(frozen=True)
class _Place:
    """Where a value of the parts' graph is: an argument of the whole, and bytes from its start."""

    argument: str
    offset: int = 0


@dataclass
class _Composition:
    graph: Graph
    states: int
    bounds: Mapping[str, int]
    kernel_of: KernelOf
    launches: list[Launch] = field(default_factory=list)
    dims: dict[str, None] = field(default_factory=dict)
    workspace_bytes: int = 0
    counter_bytes: int = 0

    def __post_init__(self) -> None:
        self.places = {value: _Place(value.name) for value in self.graph.inputs}
        for index, value in enumerate(self.graph.outputs[self.states :]):
            self.places[value] = _Place(f"result {index}")

    def add(self, node: Node) -> None:
        """Append a part's launches, its arguments replaced by those of the whole."""
        if node.op.view and node.operands[0] is not None:
            self.places.setdefault(node.results[0], self.places[node.operands[0]])
            return
        for old, new in node.consumed:
            self.places[new] = self.places[old]
        for value in node.results:
            if value not in self.places:
                self.places[value] = self._scratch(value.type.bind(self.bounds).size_bytes)
        types = tuple(None if value is None else value.type for value in node.operands)
        kernel = self.kernel_of(node.op, types, tuple(value.type for value in node.results))
        places = self._arguments(node, kernel)
        for launch in kernel.launches:
            moved = [
                replace(p, argument=places[p.argument].argument, offset=p.offset + places[p.argument].offset)
                for p in launch.parameters
            ]
            self.launches.append(replace(launch, parameters=tuple(moved)))

    def _arguments(self, node: Node, kernel: CudaKernel) -> dict[str, _Place]:
        places = {name: _Place(name) for name in kernel.dims}
        self.dims |= dict.fromkeys(kernel.dims)
        for declared, value in zip(node.op.operands(), node.operands, strict=True):
            if value is not None:
                places[declared.name] = self.places[value]
        for index, value in enumerate(node.results[len(node.op.states) :]):
            places[f"result {index}"] = self.places[value]
        if kernel.workspace_bytes:
            places["workspace"] = self._scratch(kernel.workspace_bytes)
        if kernel.counter_bytes:
            places["counters"] = _Place("counters", self.counter_bytes)
            self.counter_bytes += kernel.counter_bytes
        return places

    def _scratch(self, size: int) -> _Place:
        place = _Place("workspace", self.workspace_bytes)
        self.workspace_bytes += -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return place
