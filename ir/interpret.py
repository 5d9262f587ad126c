"""The interpreter: runs any graph at any stage on real tensors with the references. The oracle of passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from v41c.errors import VerifyError
from v41c.ir.graph import Graph, Value

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Interpreted:
    """Outputs by value name and the final states by state name."""

    outputs: dict[str, Tensor]
    states: dict[str, Tensor]


def interpret(
    graph: Graph,
    inputs: Mapping[str, Tensor],
    weights: Callable[[Value], Tensor],
    states: Mapping[str, Tensor],
    record: Callable[[str, Tensor], None] | None = None,
) -> Interpreted:
    """Run `graph`. `weights` gives the tensor of a weight value; the tensors in `states` are left untouched.

    `record` is called with the name and tensor of every node result that is not a state.
    """
    values: dict[Value, Tensor] = {}
    for declared, given in ((graph.inputs, inputs), (graph.states, states)):
        for value in declared:
            if value.name not in given:
                raise VerifyError(f"graph {graph.name}: {value.name}: expected a tensor, got none")
            values[value] = given[value.name]
    for state in graph.states:
        values[state] = values[state].clone()
    for weight in graph.weights:
        values[weight] = weights(weight)
    for node in graph.nodes:
        results = node.op.reference(*(None if value is None else values[value] for value in node.operands))
        for value, result in zip(node.results, results if isinstance(results, tuple) else (results,), strict=True):
            values[value] = result
            if record is not None and len(node.op.states) <= node.results.index(value):
                record(value.name, result)
    return Interpreted(
        {value.name: values[value] for value in graph.outputs},
        {name: values[value] for name, value in graph.finals.items()},
    )
