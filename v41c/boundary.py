"""What a sublayer boundary moves over the residual stream, operation by operation and in one pass.

DeepSeek-V4.1 report, section 2.4.1: update, coefficients, mix and norm of the stream move (4N+4)·D values a token, the
one operation that stands for them (2N+2)·D.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from v41c.ir.graph import Graph, Module, Node, Value
from v41c.ir.ops.hc_coefficients import HcCoefficients
from v41c.ir.ops.hc_mix import HcMix
from v41c.ir.ops.hc_update import HcUpdate
from v41c.ir.ops.mhc_boundary import MhcBoundary
from v41c.ir.ops.rms_norm import RmsNorm
from v41c.ir.ops.round_trip import RoundTrip
from v41c.ir.types import TensorType
from v41c.stages import is_backbone


@dataclass(frozen=True)
class Boundary:
    """The operations between a sublayer's output and the next one's input; `trip` converts that input to a format."""

    update: Node
    coefficients: Node
    mix: Node
    norm: Node
    trip: Node | None

    def moved(self) -> dict[str, int]:
        """Values of width D that each operation reads and writes, in units of D a token; the conversion is left out."""
        nodes = (self.update, self.coefficients, self.mix, self.norm)
        return {node.op.name(): self._moved(node) for node in nodes}

    @property
    def moved_converted(self) -> int:
        """Their sum, with the conversion."""
        return sum(self.moved().values()) + (0 if self.trip is None else self._moved(self.trip))

    @property
    def fused(self) -> int:
        """What one `mhc_boundary` reads and writes."""
        return self._fused("none")

    @property
    def fused_converted(self) -> int:
        """The same with the converted input as another result."""
        return self._fused("none" if self.trip is None else str(self.trip.op.attributes()["format"]))

    def _fused(self, format: str) -> int:
        op = MhcBoundary(**self.coefficients.op.attributes(), format=format)
        given = (*self.update.operands, self.mix.operands[1], *self.coefficients.operands[1:], self.norm.operands[1])
        types = tuple(None if value is None else value.type for value in given)
        return self._width((*types, *op.infer_results(types)))

    def _moved(self, node: Node) -> int:
        return self._width(None if value is None else value.type for value in (*node.operands, *node.results))

    def _width(self, types: Iterable[TensorType | None]) -> int:
        """Values of tensors [T, …, D], in units of D a token."""
        tokens, width = self.norm.results[0].type.shape
        shapes = (type.shape for type in types if type is not None)
        found = (shape for shape in shapes if len(shape) > 1 and (shape[0], shape[-1]) == (tokens, width))
        return sum(TensorType(self.norm.results[0].type.dtype, shape[1:-1]).elements for shape in found)


def boundaries(halves: Module) -> list[Boundary]:
    """Boundaries of the unfused backbone whose updated stream goes straight to the next sublayer, through no Engram."""
    found = (
        _boundary(graph, node)
        for graph in halves
        for node in graph.nodes
        if is_backbone(graph) and isinstance(node.op, HcUpdate)
    )
    return [boundary for boundary in found if boundary is not None]


def _boundary(graph: Graph, update: Node) -> Boundary | None:
    coefficients = _reader(graph, update.results[0], HcCoefficients)
    mix = _reader(graph, update.results[0], HcMix)
    norm = None if mix is None else _reader(graph, mix.results[0], RmsNorm)
    if coefficients is None or mix is None or norm is None:
        return None
    return Boundary(update, coefficients, mix, norm, _reader(graph, norm.results[0], RoundTrip))


def _reader(graph: Graph, value: Value, kind: type) -> Node | None:
    return next((node for node in graph.users.get(value, ()) if isinstance(node.op, kind)), None)
