"""Traced models, and a traced model as something that can be compared: run by the interpreter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from v41c.compile import Source, read_source, trace_source
from v41c.frontend.config import ModelConfig
from v41c.frontend.presets import TRAINED_CHECKPOINT
from v41c.frontend.weights import tensor_reader
from v41c.ir.graph import Graph, Module, Value
from v41c.ir.interpret import interpret
from v41c.ir.torch_types import torch_dtype
from v41c.manifest import capacities
from v41c.passes import remove_quantization
from v41c.passes.context import PassContext
from v41c.subject import Arithmetic, Array, Drafted, Look

GOLDEN = Path(__file__).parent / "data" / "golden"
CASES = ("case_00", "case_02", "case_04")
FOLDERS = {**{case: GOLDEN / case for case in CASES}, "tiny-v41": TRAINED_CHECKPOINT}


def no_kernel(*_: object) -> None:
    """The kernel of a pass that selects none."""
    raise AssertionError("a pass before kernel selection asked for a kernel")


def context(arithmetic: Arithmetic) -> PassContext:
    """What passes before kernel selection are told."""
    return PassContext(arithmetic, no_kernel, (1, 512))  # type: ignore[arg-type]


@cache
def traced(case: str) -> tuple[Source, Module]:
    """A checkpoint and its traced graphs, each traced once."""
    source = read_source(FOLDERS[case], no_weights=False)
    return source, trace_source(source)


def traced_in(case: str, arithmetic: Arithmetic) -> tuple[Source, Module]:
    """The graphs in an arithmetic: as traced, or after remove-quantization."""
    source, module = traced(case)
    return source, remove_quantization.run(module, context(arithmetic))


class InterpretedSubject:
    """Graphs run by the interpreter: `model`, or `encoder` and `decoder`, and the draft head's."""

    def __init__(self, source: Source, module: Module, arithmetic: Arithmetic, *, chunk: int | None = None) -> None:
        read = tensor_reader(source.checkpoint, source.compressed_ids)
        self.name = f"interpreter, {arithmetic} arithmetic"
        self.config: ModelConfig = source.config
        self.arithmetic = arithmetic
        self.module = module
        self.states: dict[str, Tensor] = {}
        self._weights: Callable[[Value], Tensor] = _cached(read)
        self._chunk = chunk
        self._length = 0

    def start(self, context: int) -> None:
        """Begin an empty sequence; NaN stands where nothing was written."""
        dims = {"S": 1, **capacities([f"C{ratio}" for ratio in set(self.config.compress_ratios) - {0}], context + 8)}
        self.states = {s.name: _unwritten(s, dims) for graph in self.module for s in graph.states}
        self._length = 0

    def feed(self, tokens: Array, look: Look) -> Array:
        """Logits f32 [T, V]."""
        size = self._chunk or len(tokens)
        return np.concatenate(
            [self.step(tokens[row : row + size], row, look).numpy() for row in range(0, len(tokens), size)]
        )

    def decode(self, token: int, look: Look) -> Array:
        """Logits f32 [V]."""
        logits: Array = self.step(np.array([token]), 0, look)[0].numpy()
        return logits

    def draft(self, token: int, look: Look) -> Drafted:
        """The draft block for the next token."""
        c = self.config
        block = torch.full((c.dspark_block_size,), c.dspark_noise_token_id, dtype=torch.int32)
        block[0] = token
        outputs = self._run(self.module["draft"], self._inputs(block), look, 0)
        return Drafted(outputs["logits"].numpy(), outputs["drafts"].numpy(), outputs["confidence"][:, 0].numpy())

    def step(self, tokens: Array, row: int, look: Look) -> Tensor:
        """One step through every graph that a step takes: logits f32 [T, V]."""
        inputs = self._inputs(torch.from_numpy(np.asarray(tokens, np.int32)))
        inputs["rows"] = torch.arange(len(tokens), dtype=torch.int32)
        for name in ("model", "encoder", "decoder", "draft_context"):
            if name in self.module:
                inputs |= self._run(self.module[name], inputs, look, row)
        self._length += len(tokens)
        return inputs["logits"]

    def _inputs(self, tokens: Tensor) -> dict[str, Tensor]:
        positions = torch.arange(self._length, self._length + len(tokens), dtype=torch.int32)
        zeros = torch.zeros_like(positions)
        return {"tokens": tokens, "positions": positions, "slots": zeros, "first": zeros}

    def _run(self, graph: Graph, inputs: Mapping[str, Tensor], look: Look, row: int) -> dict[str, Tensor]:
        def record(name: str, tensor: Tensor) -> None:
            seen = tensor.float() if tensor.is_floating_point() else tensor
            instead = look(name, row, seen.numpy().copy())
            if instead is not None:
                tensor.copy_(torch.from_numpy(np.ascontiguousarray(instead)))

        with torch.inference_mode():
            result = interpret(graph, inputs, self._weights, self.states, record)
        self.states |= result.states
        return result.outputs


def _cached(read: Callable[[Value], Tensor]) -> Callable[[Value], Tensor]:
    """Weights by name and dtype, read once."""
    kept: dict[tuple[str, str], Tensor] = {}

    def weight(value: Value) -> Tensor:
        key = (value.name, str(value.type))
        if key not in kept:
            kept[key] = read(value)
        return kept[key]

    return weight


def _unwritten(state: Value, dims: Mapping[str, int]) -> Tensor:
    shape = [int(dim) for dim in state.type.bind(dims).shape]
    tensor = torch.zeros(shape, dtype=torch_dtype(state.type.dtype))
    if tensor.is_floating_point():
        return tensor.fill_(torch.nan)
    # 0xFF is NaN as e4m3 and as an e8m0 scale; a history of −1 would be an image token, so it is a large id
    return tensor.fill_(255) if tensor.dtype == torch.uint8 else tensor.fill_(10**6)
