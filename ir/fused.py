"""Operations that passes make of others: said once, as a composition; everything else follows from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from v41c.ir.build import Builder
from v41c.ir.graph import Graph
from v41c.ir.op import Op
from v41c.ir.types import TensorType

#: applies an operation to operands of whatever kind - types, tensors, values - and gives its results
Run = Callable[..., tuple[Any, ...]]


@dataclass(frozen=True)
class FusedOp(Op):
    """A composition of operations with their roundings. Subclasses define `infer`, for the names, and `compose`."""

    traced: ClassVar[bool] = False

    def compose(self, run: Run, *operands: Any) -> tuple[Any, ...]:
        """The results, states first, from the operands by `run(op, *operands)` of every part in order."""
        raise NotImplementedError

    def inferred(self, *operands: TensorType | None) -> tuple[TensorType, ...]:
        """Result types of the composition."""
        return self.compose(lambda op, *types: op.infer_results(types), *operands)

    def parts(self, *operands: TensorType | None) -> Graph:
        """The graph of the parts; its inputs are the present operands in order, states included."""
        builder = Builder(self.name(), self.name())
        values = [
            None if kind is None else (builder.state if declared.state else builder.input)(declared.name, kind)
            for declared, kind in zip(self.operands(), operands, strict=True)
        ]
        results = self.compose(builder.apply, *values)
        given = tuple(value for value in values if value is not None)
        return Graph(self.name(), given, (), (), tuple(builder.nodes), results)

    def reference(self, *operands: Any) -> tuple[Any, ...]:
        def run(op: Op, *tensors: Any) -> tuple[Any, ...]:
            result = op.reference(*tensors)
            return result if isinstance(result, tuple) else (result,)

        return self.compose(run, *operands)

    def flops(self, *operands: TensorType | None) -> int:
        nodes = self.parts(*operands).nodes
        return sum(node.op.flops(*(None if v is None else v.type for v in node.operands)) for node in nodes)

    def touched(self, *operands: TensorType | None) -> Mapping[str, int]:
        graph = self.parts(*operands)
        total: dict[str, int] = {}
        for node in graph.nodes:
            touched = node.op.touched(*(None if v is None else v.type for v in node.operands))
            for declared, value in zip(node.op.operands(), node.operands, strict=True):
                if declared.name in touched and value in graph.inputs:
                    total[value.name] = total.get(value.name, 0) + touched[declared.name]
        return total
