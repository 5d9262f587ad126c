"""Activation memory of the programs: what stage by stage an arena needs, and the plan of one over its commands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

from v41c.ir.graph import Graph, Module, Node, Value
from v41c.layers import layer_of
from v41c.passes import plan_memory
from v41c.stages import WITHOUT_KERNELS, Stages, chosen_graphs, is_backbone


@dataclass(frozen=True)
class Place:
    """A piece of an arena: bytes from `offset` on, needed from command `begin` to command `end`, both included.

    `value` names what lies there, and `layer` the layer whose operation made it. Inputs are there before command 0
    (`begin` −1) and outputs after the last.
    """

    kind: Literal["input", "value", "output", "workspace"]
    value: str
    layer: str
    offset: int
    size_bytes: int
    begin: int
    end: int


@dataclass(frozen=True)
class MemoryPlan:
    """An arena: its size, everything that lies in it at some time, and the bytes in use at each command."""

    arena_bytes: int
    places: list[Place]
    live_bytes: list[int]


def peak_bytes(stages: Stages, name: str, dims: Mapping[str, int]) -> int:
    """Bytes of the largest backbone arena after a pass, for steps of `dims`: its plan, or what planning would make it.

    Before kernels are selected their workspaces are not known and not counted.
    """
    graphs = [graph for graph in chosen_graphs(stages[name], "most").values() if is_backbone(graph)]
    return max(plan_memory.arena_bytes(_planned(graph, stages.plans_memory, dims)) for graph in graphs)


def memory_plan(graph: Graph, shares: bool) -> MemoryPlan:
    """The plan of a graph whose kernels are selected; `shares`: values share places, as plan-memory makes them."""
    planned = _planned(graph, shares, graph.bounds)
    found = _Places(planned).run()
    return MemoryPlan(plan_memory.arena_bytes(planned), found, _live_bytes(found, len(graph.nodes)))


def _live_bytes(plan: list[Place], commands: int) -> list[int]:
    change = [0] * (commands + 1)
    for place in plan:
        change[max(0, place.begin)] += place.size_bytes
        change[place.end + 1] -= place.size_bytes
    return list(accumulate(change[:-1]))


def _planned(graph: Graph, shares: bool, dims: Mapping[str, int]) -> Graph:
    if any(value.offset is not None for value in plan_memory.stored_values(graph)):
        return graph
    bound = Module((replace(graph, bounds=graph.bounds or dims),))
    (placed,) = plan_memory.run(bound, WITHOUT_KERNELS) if shares else plan_memory.place_apart(bound)
    return placed


class _Places:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.found: dict[Value, Place] = {}

    def run(self) -> list[Place]:
        """A view lies where its operand does and prolongs its life."""
        views: dict[Value, Value] = {}
        last = len(self.graph.nodes) - 1
        for value in self.graph.inputs:
            self._add(value, "input", "", -1)
        for index, node in enumerate(self.graph.nodes):
            for operand in node.operands:
                if operand is not None:
                    self._prolong(views.get(operand, operand), index)
            for result in node.results:
                if result in self.graph.state_versions:
                    continue
                source = node.operands[0] if node.op.view else None
                if source is not None:
                    views[result] = views.get(source, source)
                else:
                    self._add(result, "value", layer_of(node.origin.module), index)
        for value in self.graph.outputs:
            owner = views.get(value, value)
            self._prolong(owner, last)
            if self.found[owner].kind == "value":
                self.found[owner] = replace(self.found[owner], kind="output")
        spaces = [_workspace(node, index) for index, node in enumerate(self.graph.nodes)]
        return [*self.found.values(), *(space for space in spaces if space is not None)]

    def _add(self, value: Value, kind: Literal["input", "value"], layer: str, begin: int) -> None:
        size = value.type.bind(self.graph.bounds).size_bytes
        self.found[value] = Place(kind, value.name, layer, value.offset or 0, size, begin, begin)

    def _prolong(self, value: Value, index: int) -> None:
        if value in self.found:
            self.found[value] = replace(self.found[value], end=index)


def _workspace(node: Node, index: int) -> Place | None:
    kernel = node.kernel
    if kernel is None or not kernel.workspace_bytes:
        return None
    layer = layer_of(node.origin.module)
    return Place("workspace", kernel.symbol, layer, kernel.workspace_offset or 0, kernel.workspace_bytes, index, index)
