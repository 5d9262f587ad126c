"""A sequence played through the graphs of the shipped model, by the interpreter or by something to compare with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

from tests.traced import traced
from v41c.frontend.weights import tensor_reader
from v41c.ir.graph import Graph, Module, Value
from v41c.ir.interpret import interpret
from v41c.ir.torch_types import torch_dtype
from v41c.ir.types import TensorType

SHIPPED = "tiny-v41"


@cache
def weight(name: str, kind: TensorType) -> Tensor:
    """A weight of the shipped model, read once."""
    source, _ = traced(SHIPPED)
    return tensor_reader(source.checkpoint, source.compressed_ids)(Value(name, kind))


#: outputs and written states of a graph, by name, from its inputs and states
Run = Callable[[Graph, Mapping[str, Tensor], Mapping[str, Tensor]], tuple[dict[str, Tensor], dict[str, Tensor]]]


def play(module: Module, run: Run, chunks: Sequence[int]) -> Iterator[tuple[str, Tensor]]:
    """All that comes out of steps of so many tokens, then of a draft block if there is one, and the last states."""
    source, _ = traced(SHIPPED)
    config = source.config
    tokens = torch.from_numpy(np.random.default_rng(7).integers(5, config.vocab_size, sum(chunks) + 1, np.int32))
    dims = {"S": 1, "C1": sum(chunks) + 8, "C2": sum(chunks) + 8}
    states = {state.name: unwritten(state.type.bind(dims)) for graph in module for state in graph.states}
    begin = 0
    for count in chunks:
        values = step(tokens[begin : begin + count], begin)
        for name in ("model", "encoder", "decoder", "draft_context"):
            if name in module:
                outputs, written = run(module[name], values, states)
                values, states = values | outputs, states | written
                yield from ((f"{name} at {begin}: {output}", value) for output, value in outputs.items())
        begin += count
    if "draft" in module:
        block = torch.full((config.dspark_block_size,), config.dspark_noise_token_id, dtype=torch.int32)
        block[0] = tokens[begin]
        outputs, _ = run(module["draft"], step(block, begin), states)
        yield from outputs.items()
    yield from states.items()


def step(tokens: Tensor, begin: int) -> dict[str, Tensor]:
    """Inputs of a step of one sequence; every row gets logits."""
    positions = torch.arange(begin, begin + len(tokens), dtype=torch.int32)
    zeros = torch.zeros_like(positions)
    rows = torch.arange(len(tokens), dtype=torch.int32)
    return {"tokens": tokens, "positions": positions, "slots": zeros, "first": zeros, "kept": zeros, "rows": rows}


def unwritten(kind: TensorType) -> Tensor:
    """A state that nothing was written to: NaN in floats and in packed rows, an id that cuts n-grams in a history."""
    shape = [int(dim) for dim in kind.shape]
    return torch.full((*shape, kind.dtype.bits // 8), 255, dtype=torch.uint8).view(torch_dtype(kind.dtype)).squeeze(-1)


def interpreted(
    graph: Graph, values: Mapping[str, Tensor], states: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A graph run by the interpreter."""
    result = interpret(graph, values, lambda value: weight(value.name, value.type), states)
    return result.outputs, result.states


def distance(found: Tensor, wanted: Tensor) -> float:
    """The largest difference, in units of the largest value; what was never written is left aside."""
    left, right = (tensor.double().nan_to_num() for tensor in (found, wanted))
    return float((left - right).abs().max() / right.abs().max().clamp_min(1e-30))
