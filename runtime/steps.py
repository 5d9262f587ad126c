"""Steps: tokens of one or several sequences through an engine's graphs at once. What schedules are written with."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from v41c.runtime.artifact import Engine
from v41c.runtime.device import Device, Observe, step_size
from v41c.runtime.images import Picture
from v41c.runtime.states import Array
from v41c.runtime.vision import Placed, Sight

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Run:
    """Consecutive tokens of one sequence: i32 [T], the first at position `start`.

    Global rows (compressed entries, index keys) of positions below `kept` are there already and are not written.
    `images` are those of the sequence, by position, that the tokens may hold a part of.
    """

    slot: int
    start: int
    tokens: Ints
    kept: int = 0
    images: tuple[Placed, ...] = ()

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.start + len(self.tokens)

    def part(self, begin: int, end: int) -> Run:
        """The tokens at positions begin … end − 1."""
        return replace(self, start=begin, tokens=self.tokens[begin - self.start : end - self.start])


@dataclass(frozen=True)
class Cuts:
    """Positions below which the window keys of a sequence were never written, in encoder and decoder layers."""

    encoder: int = 0
    decoder: int = 0

    def raised(self, other: Cuts) -> Cuts:
        """The higher of both, each: cuts only rise while a sequence lives."""
        return Cuts(max(self.encoder, other.encoder), max(self.decoder, other.decoder))


def _no_rows() -> Ints:
    return np.empty(0, np.int32)


@dataclass(frozen=True, eq=False)
class Part:
    """What a step does for one sequence.

    rows: i32 [R], ascending, the tokens of the run whose logits are wanted, counted from its first. decoded: whether
    the run goes on through the decoder; it then may want rows. cuts: raise those of the sequence before the step.
    """

    run: Run
    rows: Ints = field(default_factory=_no_rows)
    decoded: bool = True
    cuts: Cuts = field(default_factory=Cuts)

    def split(self, room: Room) -> tuple[Part | None, Part | None]:
        """As many of the first tokens as there is room for, and the rest; None for no token."""
        count = min(len(self.run.tokens), room.tokens)
        if len(self.rows) > room.rows:
            count = min(count, int(self.rows[room.rows]))
        if count == len(self.run.tokens):
            return self, None
        if count <= 0:
            return None, self
        middle = self.run.start + count
        wanted = int(np.searchsorted(self.rows, count))
        first = replace(self, run=self.run.part(self.run.start, middle), rows=self.rows[:wanted])
        rest = replace(self, run=self.run.part(middle, self.run.end), rows=self.rows[wanted:] - np.int32(count))
        return first, rest


@dataclass(frozen=True)
class Room:
    """Tokens, and rows of logits, that still fit into a step."""

    tokens: int
    rows: int

    def after(self, part: Part) -> Room:
        """What a part leaves."""
        return Room(self.tokens - len(part.run.tokens), self.rows - len(part.rows))


class Feed:
    """What is still to be done to feed a run: parts in order, as much at a time as a step has room for."""

    def __init__(self, parts: Iterator[Part], chunk_tokens: int | None = None) -> None:
        """At most `chunk_tokens` at a time, whatever the room."""
        self._parts = parts
        self._next = next(parts, None)
        self._chunk_tokens = chunk_tokens

    @property
    def done(self) -> bool:
        """Whether everything has been taken."""
        return self._next is None

    def take(self, room: Room) -> Part | None:
        """The next part of one step, None when there is no room for any of it or nothing left."""
        if self._next is None:
            return None
        tokens = room.tokens if self._chunk_tokens is None else min(room.tokens, self._chunk_tokens)
        part, rest = self._next.split(Room(tokens, room.rows))
        self._next = next(self._parts, None) if rest is None else rest
        return part


@dataclass(frozen=True)
class Plan:
    """How to feed a run: tokens that the decoder replays (`ced`), logits of every decoded token or of the last."""

    replay_tokens: int
    all_logits: bool = False

    def rows(self, part: Run, run: Run) -> Ints:
        """Rows of a part of a run whose logits are wanted: i32 [R], none before the last token unless all are."""
        rows = np.arange(len(part.tokens), dtype=np.int32)
        if self.all_logits:
            return rows
        return rows[-1:] if part.end == run.end else rows[:0]


class Steps:
    """The graphs of an engine on one device, with what they must remember of each slot.

    `cuts[slot]`: see `Cuts`. `evaluated`: tokens each graph has been run on. `drafting`: whether decoder steps write
    the draft head's context; `contexts[slot]`: positions, the latest without a gap, for which they did.
    """

    def __init__(
        self, engine: Engine, device: Device, slots: int, *, drafting: bool = False, observe: Observe | None = None
    ) -> None:
        self.engine = engine
        self.cuts = [Cuts() for _ in range(slots)]
        self.evaluated = dict.fromkeys(sorted({program.graph for program in engine.manifest.programs}), 0)
        self.observe = observe
        self.drafting = drafting
        self.contexts = [range(0)] * slots
        self._device = device
        self._sight = Sight(engine, self._execute) if engine.programs("vision") else None

    @property
    def split(self) -> bool:
        """Whether the model is cut into an encoder and a decoder, which can be run on different tokens."""
        return "encoder" in self.evaluated

    @property
    def room(self) -> Room:
        """What fits into one step."""
        graphs = ["encoder", "decoder"] if self.split else ["model"]
        rooms = [self._device.room(graph) for graph in [*graphs, *["draft_context"] * self.drafting]]
        return Room(min(tokens for tokens, _ in rooms), rooms[len(graphs) - 1][1])

    def forward(self, parts: Sequence[Part]) -> list[Floats]:
        """Logits f32 [R, V] of each part's rows, from one step that has room for all; at most one part per slot.

        The encoder runs over every token, the decoder over those of the decoded parts, which come first: it finds its
        inputs in the first rows of what the encoder left. Without an encoder of its own the model runs over all.
        """
        for part in parts:
            slot = part.run.slot
            self.cuts[slot] = self.cuts[slot].raised(part.cuts)
        decoded = [part for part in parts if part.decoded or not self.split]
        runs = [part.run for part in (*decoded, *(part for part in parts if part not in decoded))]
        inputs = _inputs(runs)
        if self.split:
            first = _per_token([self.cuts[run.slot].encoder for run in runs], runs)
            self._execute("encoder", {**inputs, **self._images(runs), "first": first}, ())
        found = np.empty((0, self.engine.manifest.vocabulary), np.float32)
        if decoded:
            found = self._finish(decoded, inputs if len(decoded) == len(runs) else _inputs(runs[: len(decoded)]))
        ends = accumulate(len(part.rows) for part in parts)
        return [found[end - len(part.rows) : end] for part, end in zip(parts, ends, strict=True)]

    def draft(self, runs: Sequence[Run], read: Collection[str]) -> dict[str, Array]:
        """Some outputs of the draft head for blocks of tokens, of each of which the first is accepted.

        Views until the next call; rows as in the flattened blocks.
        """
        first = _per_token([self._context_start(run) for run in runs], runs)
        return self._execute("draft", {**_inputs(runs), "first": first}, read)

    def _finish(self, parts: Sequence[Part], inputs: dict[str, Array]) -> Floats:
        """Logits f32 [R, V] of the rows of all parts, from the last graph of the model."""
        runs = [part.run for part in parts]
        inputs = {**inputs, "first": _per_token([self.cuts[run.slot].decoder for run in runs], runs)}
        if not self.split:
            inputs |= self._images(runs)
        begins = accumulate((len(run.tokens) for run in runs), initial=0)
        rows = _flat([part.rows + np.int32(begin) for part, begin in zip(parts, begins, strict=False)])
        outputs = self._execute("decoder" if self.split else "model", {**inputs, "rows": rows}, ("logits",))
        logits: Floats = outputs["logits"].copy()
        if self.drafting:
            self._execute("draft_context", inputs, ())
            for run in runs:
                self.contexts[run.slot] = range(self._context_start(run), run.end)
        return logits

    def _context_start(self, run: Run) -> int:
        """Where the draft head's context begins that reaches up to a run; the run's own start when there is none."""
        context = self.contexts[run.slot]
        return context.start if context.start <= run.start <= context.stop else run.start

    def see(self, pictures: Sequence[Picture]) -> None:
        """Run the vision tower over pictures, as when they are first met."""
        if self._sight is not None:
            self._sight.look(pictures)

    def _images(self, runs: Sequence[Run]) -> dict[str, Array]:
        """What stands in the place of tokens of images' spans; the vision tower sees an image when it is first met."""
        if self._sight is None:
            return {}
        return self._sight.inputs([(run.start, run.end, run.images) for run in runs])

    def _execute(
        self, graph: str, inputs: Mapping[str, Array], read: Collection[str] | None = None
    ) -> dict[str, Array]:
        outputs = self._device.execute(graph, inputs, read=read, observe=self.observe)
        self.evaluated[graph] += step_size(inputs)[0]
        return outputs


def _inputs(runs: Sequence[Run]) -> dict[str, Array]:
    return {
        "tokens": _flat([run.tokens for run in runs]),
        "positions": _flat([np.arange(run.start, run.end, dtype=np.int32) for run in runs]),
        "slots": _per_token([run.slot for run in runs], runs),
        "kept": _per_token([run.kept for run in runs], runs),
    }


def _per_token(values: Sequence[int], runs: Sequence[Run]) -> Ints:
    """A value of each run for each of its tokens: i32 [T]."""
    return np.array(values, np.int32).repeat([len(run.tokens) for run in runs])


def _flat(parts: Sequence[Ints]) -> Ints:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
