"""Traced graphs run by the interpreter, as something to compare with: the eager model with every value in sight."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from v41c.compile import Source
from v41c.frontend.config import ModelConfig
from v41c.frontend.weights import tensor_reader
from v41c.ir.graph import Graph, Module, Value
from v41c.ir.interpret import interpret
from v41c.ir.text import parse_module
from v41c.ir.torch_types import torch_dtype
from v41c.manifest import capacities
from v41c.origin import source_of
from v41c.passes import remove_quantization
from v41c.runtime.artifact import Engine
from v41c.runtime.images import Picture
from v41c.subject import Arithmetic, Array, Drafted, Look, Tokens, placed_tensors, tower_tensors


class InterpretedSubject:
    """Graphs `model`, or `encoder` and `decoder`, and the draft head's. A look is shown every value, landmark or not.

    States that no token has written hold NaN, or bytes and ids that no token could have written.
    """

    companions: frozenset[str] = frozenset()

    def __init__(self, source: Source, module: Module, arithmetic: Arithmetic) -> None:
        if source.checkpoint is None:
            raise ValueError("source: expected a checkpoint, got a configuration alone")
        self.config: ModelConfig = source.config
        self.arithmetic: Arithmetic = arithmetic
        self.states: dict[str, Tensor] = {}
        self._module = module
        self._weight = cached(tensor_reader(source.checkpoint, source.compressed_ids))
        self._length = 0
        self._rows: dict[Picture, Array] = {}

    @classmethod
    def of_engine(cls, engine: Engine, checkpoint: Path) -> InterpretedSubject:
        """The graphs that an engine was made of, in its arithmetic, as they stood before anything was fused."""
        (text,) = (engine.path / "graphs").glob(f"*_{remove_quantization.NAME}.ir")
        return cls(
            source_of(engine, checkpoint), parse_module(text.read_text(encoding="utf-8")), engine.manifest.arithmetic
        )

    @property
    def name(self) -> str:
        """What it is, for people."""
        return f"interpreter, {self.arithmetic} arithmetic"

    def start(self, context: int) -> None:
        """Begin an empty sequence."""
        ratios = sorted(set(self.config.compress_ratios) - {0})
        dims = {"S": 1, **capacities([f"C{ratio}" for ratio in ratios], context)}
        self.states = {state.name: unwritten(state, dims) for graph in self._module for state in graph.states}
        self._length = 0
        self._rows = {}

    def see(self, picture: Picture, look: Look) -> None:
        """Keep the picture's rows, as f32."""
        inputs = tower_tensors(picture, self.arithmetic)
        self._rows[picture] = self.run(self._module["vision"], inputs, look)["features"].float().numpy()

    def feed(self, tokens: Tokens, look: Look) -> Array:
        """Logits f32 [T, V]."""
        inputs = self.inputs(tokens)
        inputs["rows"] = torch.arange(len(tokens), dtype=torch.int32)
        for name in ("model", "encoder", "decoder", "draft_context"):
            if name in self._module:
                inputs |= self.run(self._module[name], inputs, look)
        self._length += len(tokens)
        return inputs["logits"].numpy()

    def decode(self, token: int, look: Look) -> Array:
        """Logits f32 [V]."""
        logits: Array = self.feed(np.array([token]), look)[0]
        return logits

    def draft(self, token: int, look: Look) -> Drafted:
        """The draft block for the next token."""
        c = self.config
        block = torch.full((c.dspark_block_size,), c.dspark_noise_token_id, dtype=torch.int32)
        block[0] = token
        outputs = self.run(self._module["draft"], self.inputs(block.numpy()), look)
        return Drafted(outputs["logits"].numpy(), outputs["drafts"].numpy(), outputs["confidence"][:, 0].numpy())

    def inputs(self, tokens: Tokens) -> dict[str, Tensor]:
        """Inputs of a step of tokens [T] that follow the sequence."""
        positions = torch.arange(self._length, self._length + len(tokens), dtype=torch.int32)
        zeros = torch.zeros_like(positions)
        ids = torch.from_numpy(np.asarray(tokens, np.int32))
        batch = {"tokens": ids, "positions": positions, "slots": zeros, "first": zeros, "kept": zeros}
        if not self.config.has_vision:
            return batch
        return batch | placed_tensors(self, tokens, self._rows)

    def run(self, graph: Graph, inputs: Mapping[str, Tensor], look: Look) -> dict[str, Tensor]:
        """Outputs of a graph; states go on."""

        def record(name: str, tensor: Tensor) -> None:
            seen = tensor.float() if tensor.is_floating_point() else tensor
            instead = look(name, 0, seen.numpy().copy())
            if instead is not None:
                tensor.copy_(torch.from_numpy(np.ascontiguousarray(instead)))

        with torch.inference_mode():
            result = interpret(graph, inputs, self._weight, self.states, record)
        self.states |= result.states
        return result.outputs


def cached(read: Callable[[Value], Tensor]) -> Callable[[Value], Tensor]:
    """Weights by name and type, read once."""
    kept: dict[tuple[str, str], Tensor] = {}

    def weight(value: Value) -> Tensor:
        key = (value.name, str(value.type))
        if key not in kept:
            kept[key] = read(value)
        return kept[key]

    return weight


def unwritten(state: Value, dims: Mapping[str, int]) -> Tensor:
    """A state that no token has written: NaN, or bytes and ids that no token could have written."""
    shape = [int(dim) for dim in state.type.bind(dims).shape]
    tensor = torch.zeros(shape, dtype=torch_dtype(state.type.dtype))
    if tensor.is_floating_point():
        return tensor.fill_(torch.nan)
    # 0xFF is NaN as e4m3 and as an e8m0 scale; an id of −1 would be an image token, so it is a large one
    return tensor.fill_(255) if tensor.dtype == torch.uint8 else tensor.fill_(10**6)
