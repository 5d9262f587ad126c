"""A fixed sequence of steps through the graphs of any stage, by the interpreter, with every value kept.

The caches it leaves are not trivial: a prefill longer than the window and than what the candidate blocks hold, a chunk
of two sequences with images in it, single tokens of both, and draft blocks. The variant of a graph is the one that the
runtime would take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from v41c.frontend.config import ModelConfig
from v41c.interpreted import unwritten
from v41c.ir.graph import Graph, Module, Value
from v41c.ir.interpret import Interpreted, interpret
from v41c.ir.torch_types import torch_dtype
from v41c.manifest import capacities
from v41c.runtime.images import END, NEWLINE, START, Grid, Picture
from v41c.runtime.vision import TEXT, tower_inputs

Record = Callable[[str, Tensor], None]
Run = Callable[
    [Graph, Mapping[str, Tensor], Callable[[Value], Tensor], Mapping[str, Tensor], Record | None], Interpreted
]
#: sequences, and most logit rows of a step
SLOTS, MOST_ROWS = 2, 64
#: most tokens of a step, and of the long prefill in all: what the interpreter does in seconds
_CHUNK, _LONGEST = 512, 1024
#: positions of an image's span
_IMAGE = 5


@dataclass(frozen=True)
class Step:
    """Tokens of one or two sequences, a draft block of one, or images: the inputs by name.

    i32 [T] and `rows` i32 [R], and where images are, as the graphs have it, floats as f32.
    """

    name: str
    inputs: Mapping[str, Tensor]
    part: Literal["model", "draft", "vision"] = "model"

    @property
    def tokens(self) -> int:
        """T: tokens, or patches of images."""
        return len(self.inputs["patches" if self.part == "vision" else "tokens"])


@dataclass(frozen=True)
class Seen:
    """Something that a step computed: a value, or a state as the step left it; `part` is the group of graphs it is of.

    Seen things of a step come in the order in which they were computed.
    """

    part: str
    name: str
    tensor: Tensor
    is_state: bool
    is_output: bool


def script(config: ModelConfig, seed: int) -> list[Step]:
    """The steps for a model: random tokens, the same for the same seed."""
    draw = np.random.default_rng(seed)
    lengths = [0] * SLOTS
    values = torch.from_numpy(np.random.default_rng(seed).standard_normal((_IMAGE, config.dim), np.float32))

    def step(name: str, counts: Sequence[int], first: int = 0, images: int = 0, kept: int = 0) -> Step:
        ids = draw.integers(0, config.vocab_size, sum(counts))
        rows = np.full(len(ids), TEXT)
        if images and config.image_token_id >= 0:
            ids[2 : 2 + images] = config.image_token_id
            rows[2 : 2 + images] = [START, *range(images - 3), NEWLINE, END]
        positions = [np.arange(lengths[slot], lengths[slot] + count) for slot, count in enumerate(counts)]
        for slot, count in enumerate(counts):
            lengths[slot] += count
        slots = np.repeat(np.arange(SLOTS), counts)
        cuts = np.full(len(ids), first)
        inputs = _inputs(ids, np.concatenate(positions), slots, cuts, np.full(len(ids), kept))
        if config.has_vision:
            inputs |= {"image_rows": torch.from_numpy(rows.astype(np.int32)), "image_values": values[: len(ids)]}
        return Step(name, inputs)

    steps = []
    for begin in range(0, (longest := _longest(config)), _CHUNK):
        count = min(_CHUNK, longest - begin)
        steps.append(step(f"prefill of {count} tokens{f' from {begin}' if begin else ''}", (count, 0)))
    steps.append(step("chunk of 22 and 17 tokens of two sequences", (22, 17), images=_IMAGE))
    steps += [step(f"decode of sequence {slot}", [int(slot == each) for each in range(SLOTS)]) for slot in (0, 1, 0)]
    # keys of the window below position 3 were never written, as after a replay
    steps.append(step("chunk of 9 tokens behind a cut", (0, 9), first=3))
    # global rows of its first half are there already, as in a replay
    steps.append(step("replay of 4 tokens and 5 new ones", (0, 9), first=3, kept=lengths[1] + 4))
    if config.has_draft:
        for count in sorted({1, config.dspark_block_size}):
            ids = np.full(count, config.dspark_noise_token_id)
            ids[0] = draw.integers(0, config.vocab_size)
            positions = np.arange(lengths[0], lengths[0] + count)
            zeros = np.zeros_like(positions)
            steps.append(Step(f"draft of {count} tokens", _inputs(ids, positions, zeros, zeros, zeros), "draft"))
    if config.has_vision:
        steps.append(_images(config, seed))
    return steps


def _images(config: ModelConfig, seed: int) -> Step:
    """Two images of noise, of which neither is whole blocks of patches."""
    draw = np.random.default_rng(seed)
    pictures = []
    for rows, columns in ((4, 5), (2, 7)):
        patches = draw.uniform(-1, 1, (rows * columns, 3 * config.vision_patch_size**2)).astype(np.float32)
        pictures.append(Picture(Grid(rows, columns, config.vision_downsample_ratio), patches, b""))
    inputs = tower_inputs(pictures)
    return Step("images of 20 and 14 patches", {k: torch.from_numpy(v) for k, v in inputs.items()}, "vision")


def _longest(config: ModelConfig) -> int:
    """Tokens of the long prefill: more than windows, candidate blocks and selections hold, within reason."""
    held = [2 * config.window_size]
    if config.index_source_layers:
        held.append(config.index_topk * max(config.compress_ratios))
    if config.candidate_source_layer >= 0:
        ratio = config.compress_ratios[config.candidate_source_layer]
        held.append(config.candidate_topk_blocks * config.candidate_block_size * ratio)
    return min(_LONGEST, max(held) + 5)


def _inputs(ids: object, positions: object, slots: object, first: object, kept: object) -> dict[str, Tensor]:
    named = {"tokens": ids, "positions": positions, "slots": slots, "first": first, "kept": kept}
    found = {name: torch.from_numpy(np.asarray(array, np.int32)) for name, array in named.items()}
    count = len(found["tokens"])
    return found | {"rows": torch.arange(max(0, count - MOST_ROWS), count, dtype=torch.int32)}


class Playback:
    """States of all sequences, and what the graphs of a module compute on them step by step."""

    def __init__(
        self, config: ModelConfig, module: Module, weight: Callable[[Value], Tensor], run: Run = interpret
    ) -> None:
        self._module, self._weight, self._run = module, weight, run
        ratios = sorted(set(config.compress_ratios) - {0})
        context = _longest(config) + 64
        dims = {"S": SLOTS, **capacities([f"C{ratio}" for ratio in ratios], context)}
        self._states = {state.name: unwritten(state, dims) for graph in module for state in graph.states}

    def play(self, step: Step) -> list[Seen]:
        """Everything that a step computes."""
        seen: list[Seen] = []
        values = dict(step.inputs)
        parts = _PARTS if step.part == "model" else {step.part: step.part}
        for name, part in parts.items():
            graph = self._graph(name, step.tokens)
            if graph is not None:
                found, outputs = self._one(graph, values)
                seen += [Seen(part, *each) for each in found]
                values |= outputs
        return seen

    def _one(
        self, graph: Graph, inputs: Mapping[str, Tensor]
    ) -> tuple[list[tuple[str, Tensor, bool, bool]], dict[str, Tensor]]:
        values: dict[str, Tensor] = {}
        inputs = {value.name: inputs[value.name].to(torch_dtype(value.type.dtype)) for value in graph.inputs}
        with torch.inference_mode():
            result = self._run(graph, inputs, self._weight, self._states, values.__setitem__)
        self._states |= result.states
        return list(_in_order(graph, values, result)), result.outputs

    def _graph(self, name: str, tokens: int) -> Graph | None:
        """The graph, or its smallest variant with room for so many tokens; None where the module has none."""
        variants = [graph for graph in self._module if graph.name.partition(":")[0] == name]
        fitting = [graph for graph in variants if graph.bounds.get("T", tokens) >= tokens]
        return min(fitting, key=lambda graph: graph.bounds.get("T", tokens), default=None)


#: graphs in the order in which they run, and the part of the model that they are
_PARTS = {"model": "model", "encoder": "model", "decoder": "model", "draft_context": "draft context"}


def _in_order(
    graph: Graph, values: Mapping[str, Tensor], result: Interpreted
) -> Iterator[tuple[str, Tensor, bool, bool]]:
    """Name, tensor, whether it is a state, whether an output, in the order of the nodes; a state once, at its end."""
    outputs = {value.name for value in graph.outputs}
    finals = {value: name for name, value in graph.finals.items()}
    for node in graph.nodes:
        for value in node.results:
            if value in finals:
                yield finals[value], result.states[finals[value]], True, False
            elif value.name in values:
                yield value.name, values[value.name], False, value.name in outputs
