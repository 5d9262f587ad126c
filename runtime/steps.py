"""Steps: chunks of tokens through an engine's graphs. What schedules are written with."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from v41c.runtime.artifact import Engine
from v41c.runtime.device import Device, Observe
from v41c.runtime.states import Array

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Run:
    """Consecutive tokens of one sequence: i32 [T], the first at position `start`."""

    slot: int
    start: int
    tokens: Ints

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.start + len(self.tokens)

    def part(self, begin: int, end: int) -> Run:
        """The tokens at positions begin … end − 1."""
        return Run(self.slot, begin, self.tokens[begin - self.start : end - self.start])

    def parts(self, most_tokens: int) -> Iterator[Run]:
        """The run in pieces of `most_tokens`, the last one shorter."""
        for begin in range(self.start, self.end, most_tokens):
            yield self.part(begin, min(begin + most_tokens, self.end))


@dataclass(frozen=True)
class Plan:
    """How to feed a run: tokens per step, tokens the decoder replays (`ced`), logits of every token or of the last."""

    chunk_tokens: int
    replay_tokens: int
    all_logits: bool = False


class Steps:
    """The graphs of an engine on one device, with what they must remember of each slot.

    `cuts[slot]`: the decoder's window keys below this position were never written. `evaluated`: tokens each graph has
    been run on. With `drafting`, the draft head's context follows every decoder step.
    """

    def __init__(
        self, engine: Engine, device: Device, slots: int, *, drafting: bool = False, observe: Observe | None = None
    ) -> None:
        self.engine = engine
        self.cuts = [0] * slots
        self.evaluated = dict.fromkeys(sorted({program.graph for program in engine.manifest.programs}), 0)
        self.observe = observe
        self._device = device
        self._drafting = drafting

    @property
    def split(self) -> bool:
        """Whether the model is cut into an encoder and a decoder, which can be run on different tokens."""
        return "encoder" in self.evaluated

    @property
    def whole(self) -> tuple[str, ...]:
        """The graphs that make up the model, in the order in which they run."""
        return ("encoder", "decoder") if self.split else ("model",)

    def most_tokens(self, graphs: Sequence[str], plan: Plan) -> int:
        """Tokens that a step may take through all of these graphs under a plan."""
        rooms = [self._room(graph) for graph in graphs]
        wanted = [
            rows for graph, (_, rows) in zip(graphs, rooms, strict=True) if plan.all_logits and graph != "encoder"
        ]
        return min(plan.chunk_tokens, *(tokens for tokens, _ in rooms), *wanted)

    def most_step(self) -> tuple[int, int]:
        """The most tokens and the most logit rows of one step through the whole model."""
        tokens, rows = zip(*(self._room(graph) for graph in self.whole), strict=True)
        return min(tokens), rows[-1]

    def encode(self, runs: Sequence[Run]) -> dict[str, Array]:
        """Outputs of the encoder, by name, rows as in the flattened runs: views that hold until the next call."""
        return self._encode(_inputs(runs))

    def decode(self, runs: Sequence[Run], encoded: Mapping[str, Array], rows: Ints) -> Floats:
        """Logits f32 [R, V] of some rows of the flattened runs, from copies of the encoder's outputs."""
        return self._finish("decoder", runs, {**_inputs(runs), **encoded}, rows)

    def forward(self, runs: Sequence[Run], rows: Ints) -> Floats:
        """Logits f32 [R, V] of some rows of the flattened runs, through the whole model."""
        inputs = _inputs(runs)
        if not self.split:
            return self._finish("model", runs, inputs, rows)
        self._encode(inputs, read=())
        return self._finish("decoder", runs, inputs, rows)

    def draft(self, run: Run) -> dict[str, Array]:
        """Outputs of the draft head for a block of tokens of which the first is accepted: views as in `encode`."""
        return self._execute("draft", {**_inputs([run]), "first": self._first([run])})

    def _encode(self, inputs: Mapping[str, Array], read: Collection[str] | None = None) -> dict[str, Array]:
        # The encoder runs over every token, so no key of its window is ever missing.
        return self._execute("encoder", {**inputs, "first": np.zeros_like(inputs["positions"])}, read)

    def _finish(self, graph: str, runs: Sequence[Run], inputs: Mapping[str, Array], rows: Ints) -> Floats:
        outputs = self._execute(graph, {**inputs, "first": self._first(runs), "rows": rows}, ("logits",))
        logits: Floats = outputs["logits"].copy()
        if self._drafting:
            self._execute("draft_context", inputs, ())
        return logits

    def _first(self, runs: Sequence[Run]) -> Ints:
        return _flat([np.full(len(run.tokens), self.cuts[run.slot], np.int32) for run in runs])

    def _room(self, graph: str) -> tuple[int, int]:
        tokens, rows = self._device.room(graph)
        if self._drafting and graph != "encoder":
            tokens = min(tokens, self._device.room("draft_context")[0])
        return tokens, rows

    def _execute(
        self, graph: str, inputs: Mapping[str, Array], read: Collection[str] | None = None
    ) -> dict[str, Array]:
        outputs = self._device.execute(graph, inputs, read=read, observe=self.observe)
        self.evaluated[graph] += len(inputs["positions"])
        return outputs


def last_rows(runs: Sequence[Run]) -> Ints:
    """Rows of each run's last token among the flattened runs: i32 [runs]."""
    return np.cumsum([len(run.tokens) for run in runs], dtype=np.int32) - np.int32(1)


def wanted_rows(part: Run, run: Run, plan: Plan) -> Ints:
    """Rows of a part of a run whose logits the plan asks for: i32 [R], none before the last part unless all are."""
    rows = np.arange(len(part.tokens), dtype=np.int32)
    if plan.all_logits:
        return rows
    return rows[-1:] if part.end == run.end else rows[:0]


def _inputs(runs: Sequence[Run]) -> dict[str, Array]:
    return {
        "tokens": _flat([run.tokens for run in runs]),
        "positions": _flat([np.arange(run.start, run.end, dtype=np.int32) for run in runs]),
        "slots": _flat([np.full(len(run.tokens), run.slot, np.int32) for run in runs]),
    }


def _flat(parts: Sequence[Ints]) -> Ints:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
