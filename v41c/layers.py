"""The plan of the layers, read off the graphs: what each attends to, who feeds whom, and which graph it stands in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from v41c.ir.graph import Graph, Module, Node, Value
from v41c.ir.types import TensorType

Mode = Literal["window", "full", "reindex", "reuse"]


@dataclass(frozen=True)
class Layer:
    """A layer by its module path, `layers.3` or `mtp.0`.

    `part` is the graph its attention stands in: encoder, decoder or draft. `kv_source` and `index_source` are the
    layers whose rows and selection it uses, itself included; `candidate_source` is the one whose candidates restrict
    its own selection. `window`, `rows` and `keys` are the states it reads. `engram`: it adds an Engram lookup;
    `draft_target`: the draft head sees the stream that enters it.
    """

    name: str
    part: str
    mode: Mode
    ratio: int
    kv_source: str | None
    index_source: str | None
    candidate_source: str | None
    engram: bool
    draft_target: bool
    window: str
    rows: str | None
    keys: str | None


def layer_of(module: str) -> str:
    """The layer a module path lies in: `layers.3` of `layers.3.attn.wq_a`, empty outside the layers."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] in ("layers", "mtp") and len(parts) > 1 else ""


def layer_plan(halves: Module) -> tuple[Layer, ...]:
    """Every layer in order, from graphs of one semantic operation each (`Stages.halves`)."""
    writers = _writers(halves)
    return tuple(layer for graph in halves for layer in _Plan(graph, writers).layers())


def state_types(module: Module) -> dict[str, TensorType]:
    """Types of the states of all graphs, by name."""
    return {state.name: state.type for graph in module for state in graph.states}


def _writers(module: Module) -> dict[str, str]:
    """The layer that writes each global state."""
    return {
        graph.state_versions[old]: layer_of(node.origin.module)
        for graph in module
        for node in graph.nodes
        if node.op.name() == "cache_write"
        for old, _ in node.consumed
    }


class _Plan:
    def __init__(self, graph: Graph, writers: dict[str, str]) -> None:
        self.graph = graph
        self.writers = writers
        self.engrams = {layer_of(node.origin.module) for node in self._all("engram_lookup")}
        self.targets = {
            layer_of(reader.origin.module)
            for node in self._all("stream_mean")
            for value in node.operands
            if value is not None
            for reader in graph.users[value]
            if reader.op.name() == "hc_coefficients"
        }

    def layers(self) -> Iterator[Layer]:
        for node in self._all("attention"):
            yield self._layer(node)

    def _layer(self, attention: Node) -> Layer:
        name = layer_of(attention.origin.module)
        rows, selection = self._state(attention.operand("compressed")), self._producer(attention.operand("selection"))
        keys = self._state(selection.operand("keys")) if selection is not None else None
        pool = self._producer(selection.operand("pool")) if selection is not None else None
        kv_source = self.writers[rows] if rows is not None else None
        index_source = layer_of(selection.origin.module) if selection is not None else None
        return Layer(
            name=name,
            part=self.graph.name,
            mode=_mode(name, kv_source, index_source),
            ratio=int(selection.op.attributes()["ratio"]) if selection is not None else 0,
            kv_source=kv_source,
            index_source=index_source,
            candidate_source=layer_of(pool.origin.module) if pool is not None and index_source == name else None,
            engram=name in self.engrams,
            draft_target=name in self.targets,
            window=self._state(attention.operand("window")) or "",
            rows=rows,
            keys=keys,
        )

    def _all(self, op: str) -> Iterator[Node]:
        return (node for node in self.graph.nodes if node.op.name() == op)

    def _state(self, value: Value | None) -> str | None:
        return None if value is None else self.graph.state_versions[value]

    def _producer(self, value: Value | None) -> Node | None:
        return None if value is None else self.graph.producers[value]


def _mode(name: str, kv_source: str | None, index_source: str | None) -> Mode:
    if kv_source is None:
        return "window"
    if kv_source == name:
        return "full"
    return "reindex" if index_source == name else "reuse"
