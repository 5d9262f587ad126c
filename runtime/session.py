"""A session: sequences in slots of one engine, their lengths, and what may be asked of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from v41c.errors import ContextError, UsageError
from v41c.runtime import schedules
from v41c.runtime.artifact import Engine
from v41c.runtime.device import Observe
from v41c.runtime.devices import open_device
from v41c.runtime.images import Picture
from v41c.runtime.profile import Profile, known_profile
from v41c.runtime.schedules import Schedule
from v41c.runtime.states import Array
from v41c.runtime.steps import Cuts, Feed, Floats, Ints, Part, Plan, Room, Run, Steps
from v41c.runtime.vision import Placed, image_rules, images_of

Tokens = Sequence[int] | npt.NDArray[np.integer]


@dataclass(frozen=True, eq=False)
class Draft:
    """Proposals for what follows a token: drafts i32 [B], confidence logits f32 [B], logits f32 [B, V] if wanted."""

    drafts: Ints
    confidence: Floats
    logits: Floats


@dataclass(frozen=True)
class Standing:
    """Where a sequence stands, beside the rows of its states.

    length: tokens that it holds. kept: see `Run`. cuts: see `Cuts`. context: positions of the draft head's context.
    """

    length: int
    kept: int = 0
    cuts: Cuts = field(default_factory=Cuts)
    context: range = range(0)


class Session:
    """Sequences of one engine. Every call is checked before any work.

    One session is for one thread; several sessions of an engine share its weights and may run at once.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        slots: int = 1,
        max_context: int | None = None,
        drafting: bool = False,
        observe: Observe | None = None,
        threads: int | None = None,
        poison: bool = False,
    ) -> None:
        """Memory for `slots` sequences of up to `max_context` tokens (the engine's limit when None).

        drafting: see `drafting`; with memory for `rewind`. observe: see `Device.execute`.
        threads: of every session of this engine, one per processor at first.
        poison: fill memory that no token has written with NaN. ContextError when the engine has no such room.
        """
        limits = engine.manifest
        context = limits.max_context if max_context is None else max_context
        for name, value, most in (("slots", slots, limits.slots), ("context", context, limits.max_context)):
            if not 1 <= value <= most:
                raise ContextError(f"{name}: expected 1 to {most}, what the engine was compiled for, got {value}")
        if threads is not None and threads < 1:
            raise UsageError(f"threads: expected at least 1, got {threads}")
        engine.require_weights()
        self.engine = engine
        self.max_context = context
        self._verified_tokens = limits.draft_block + 1 if drafting else 0
        self._device = open_device(
            engine, slots, context, threads=threads, poison=poison, saved_tokens=self._verified_tokens
        )
        self._steps = Steps(engine, self._device, slots, observe=observe)
        self.drafting = drafting
        self._lengths: list[int | None] = [0] * slots
        self._kept = [0] * slots
        #: lengths that each sequence can be taken back to
        self._reachable: list[range] = [range(0)] * slots
        self._times: Profile | None = None

    @property
    def drafting(self) -> bool:
        """Whether decoder steps keep up the draft head's context, for `draft` to look at.

        It may be set between steps: drafts look no further back than to where it was set last, which makes them worse
        but not wrong. ContextError when the engine has no draft head.
        """
        return self._steps.drafting

    @drafting.setter
    def drafting(self, value: bool) -> None:
        if value and not self.engine.programs("draft"):
            raise ContextError(f"{self.engine.path}: this engine has no draft head")
        self._steps.drafting = value

    @property
    def draft_block(self) -> int:
        """Drafts that a step can verify of a sequence; 0 unless the session was opened for drafting."""
        return max(0, self._verified_tokens - 1)

    @property
    def hardware(self) -> str:
        """What the session runs on, in words: as long as they stay the same, so do times."""
        return self._device.hardware

    def times(self) -> Profile | None:
        """How long steps take: known from before, else measured now, within 2 s for a small model.

        None while they are not known and the session is not empty. UsageError unless it was opened for drafting.
        """
        if not self.draft_block:
            raise UsageError("times: open the session with drafting=True")
        if self._times is None:
            self._times = known_profile(self)
        return self._times

    @property
    def evaluated(self) -> Mapping[str, int]:
        """Tokens that each graph has been run on since the session began."""
        return self._steps.evaluated

    @property
    def block_evaluations(self) -> int:
        """Tokens times backbone layers that have been evaluated since the session began."""
        return sum(self.engine.blocks(graph) * tokens for graph, tokens in self.evaluated.items())

    @property
    def memory_bytes(self) -> int:
        """States and activations; not the weights."""
        return self._device.memory_bytes

    @property
    def states(self) -> Mapping[str, Array]:
        """The states by name, for comparisons."""
        return {state.name: self._device.state(state.name) for state in self.engine.manifest.states}

    @property
    def default_mode(self) -> str:
        """`ced` when the engine can be run that way, else `full`."""
        return "full" if schedules.find("ced").why_not(self.engine) else "ced"

    def length(self, slot: int = 0) -> int:
        """Tokens that a sequence holds."""
        length = self._lengths[self._slot(slot)]
        if length is None:
            raise ContextError(f"slot {slot}: its last step was interrupted: reset it and feed the tokens again")
        return length

    @property
    def empty(self) -> bool:
        """Whether no slot holds any token."""
        return all(length == 0 for length in self._lengths)

    def reset(self, slot: int = 0) -> None:
        """Forget a sequence."""
        self._device.clear(self._slot(slot))
        self.resume(Standing(0), slot=slot)

    def standing(self, slot: int = 0) -> Standing:
        """Where a sequence stands: with the rows of its states, all that there is of it."""
        length = self.length(slot)
        return Standing(length, self._kept[slot], self._steps.cuts[slot], self._steps.contexts[slot])

    def resume(self, standing: Standing, *, slot: int = 0) -> None:
        """Let a sequence, whose rows are in their states by now, go on from where it stood."""
        self._lengths[self._slot(slot)] = standing.length
        self._kept[slot] = standing.kept
        self._steps.cuts[slot] = standing.cuts
        self._steps.contexts[slot] = standing.context
        self._reachable[slot] = range(0)

    def rows(self, name: str, slot: int, begin: int, end: int) -> Array:
        """Rows begin … end − 1 of one sequence's state, copied."""
        return self._device.rows(name, self._slot(slot), begin, end)

    def put_rows(self, name: str, slot: int, begin: int, rows: Array) -> None:
        """Put what `rows` gave into a state, as its rows from `begin` on."""
        self._device.put_rows(name, self._slot(slot), begin, rows)

    def prefill(
        self,
        tokens: Tokens,
        *,
        slot: int = 0,
        mode: str | None = None,
        replay: int | None = None,
        chunk: int | None = None,
    ) -> Floats:
        """Append tokens to a sequence; logits f32 [V] of the last.

        mode: a schedule (`ced` or `full`), `default_mode` when None. replay: tokens that `ced` runs the decoder over,
        the window when None. chunk: tokens per step, as many as the engine takes when None.

        ContextError, before any work, for an empty prompt, tokens outside the vocabulary or beyond the context;
        UsageError for a mode the engine cannot run.
        """
        logits: Floats = self._append(self.feed(tokens, slot=slot, mode=mode, replay=replay, chunk=chunk))[-1]
        return logits

    def prefill_all(
        self,
        tokens: Tokens,
        *,
        slot: int = 0,
        mode: str | None = None,
        replay: int | None = None,
        chunk: int | None = None,
    ) -> Floats:
        """As `prefill`; logits f32 [N, V] of every token that the decoder ran over."""
        return self._append(self.feed(tokens, slot=slot, mode=mode, replay=replay, chunk=chunk, all_logits=True))

    def see(self, picture: Picture) -> None:
        """Run the vision tower over a picture alone, now; a prompt that holds it finds its rows there.

        UsageError when the model takes no images.
        """
        image_rules(self.engine)
        self._steps.see([picture])

    def decode(self, token: int, *, slot: int = 0) -> Floats:
        """Append one token; its logits f32 [V]."""
        logits: Floats = self._append(self.feed([token], slot=slot, mode="decode"))[-1]
        return logits

    def step(self, tokens: Mapping[int, Tokens]) -> Floats:
        """Append tokens to several sequences, by slot, in one step; logits f32 [slots, V] of each one's last token.

        ContextError, before any work, as for `prefill`, and when they are more than one step takes.
        """
        if not tokens:
            return np.empty((0, self.engine.manifest.vocabulary), np.float32)
        parts = [_last(self._run(given, slot)) for slot, given in tokens.items()]
        room, total = self.room, sum(len(part.run.tokens) for part in parts)
        if total > room.tokens or len(parts) > room.rows:
            raise ContextError(
                f"step: expected at most {room.tokens} tokens of {room.rows} sequences, got {total} of {len(parts)}: "
                "split it"
            )
        return np.concatenate(self.advance(parts))

    def verify(self, tokens: Mapping[int, Tokens]) -> dict[int, Floats]:
        """Append tokens to several sequences, by slot, in one step, so that `rewind` can take them back.

        Logits f32 [T, V] of every token by slot. At most a block of drafts and the token before it for each sequence.
        UsageError unless the session was opened for drafting; ContextError, before any work, as for `step`.
        """
        parts = [self.verification(given, slot=slot) for slot, given in tokens.items()]
        room, total = min(self.room.tokens, self.room.rows), sum(len(part.run.tokens) for part in parts)
        if total > room:
            raise ContextError(f"verify: expected at most {room} tokens in one step, got {total}: split it")
        logits = self.advance(parts, revocable=tokens) if parts else []
        return {part.run.slot: rows for part, rows in zip(parts, logits, strict=True)}

    def verification(self, tokens: Tokens, *, slot: int = 0) -> Part:
        """What `verify` does for one sequence, for `advance` to do: errors as there."""
        most = self._verified_tokens
        if not most:
            raise UsageError("verify: open the session with drafting=True")
        run = self._run(tokens, slot)
        if len(run.tokens) > most:
            raise ContextError(f"verify: slot {slot}: expected at most {most} tokens, got {len(run.tokens)}")
        return Part(run, np.arange(len(run.tokens), dtype=np.int32))

    def rewind(self, length: int, *, slot: int = 0) -> None:
        """Take a sequence back to its first `length` tokens: all is as if the others had never been fed.

        ContextError unless they were fed by the sequence's last `verify`, and nothing since.
        """
        standing, reachable = self.standing(slot), self._reachable[slot]
        if length not in reachable:
            within = f"{reachable.start} to {standing.length}" if reachable else "its last verification, which is over"
            raise ContextError(f"rewind: slot {slot}: expected a length within {within}, got {length}")
        self._device.restore(slot, length)
        context = range(standing.context.start, min(standing.context.stop, length))
        self.resume(replace(standing, length=length, context=context), slot=slot)
        self._reachable[slot] = range(reachable.start, length + 1)

    @property
    def slots(self) -> int:
        """Sequences that there is memory for."""
        return len(self._lengths)

    @property
    def room(self) -> Room:
        """Tokens and rows of logits that one step takes."""
        return self._steps.room

    def feed(
        self,
        tokens: Tokens,
        *,
        slot: int = 0,
        mode: str | None = None,
        replay: int | None = None,
        chunk: int | None = None,
        all_logits: bool = False,
    ) -> Feed:
        """What appends tokens to a sequence, for `advance` to do: arguments and errors as for `prefill`."""
        schedule = self._schedule(mode, replay, chunk)
        plan = Plan(self.engine.manifest.window if replay is None else replay, all_logits)
        return Feed(schedule.parts(self._run(tokens, slot), plan), chunk)

    def check(self, tokens: Tokens, *, mode: str | None, replay: int | None, chunk: int | None) -> None:
        """Raise what `feed` would raise for a sequence that is still empty."""
        self._schedule(mode, replay, chunk)
        self._checked(tokens, 0)

    def advance(self, parts: Sequence[Part], *, revocable: Collection[int] = ()) -> list[Floats]:
        """One step with room for all parts, at most one of each sequence: logits f32 [R, V] of each part's rows.

        revocable: slots whose part is a `verification`, which `rewind` can take back. A sequence is unusable while its
        last tokens are in the encoder only or its step was interrupted.
        """
        for part in parts:
            run = part.run
            self._lengths[run.slot] = None
            self._reachable[run.slot] = range(0)
            if run.slot in revocable:
                self._device.save(run.slot, run.start, run.end)
        logits = self._steps.forward(parts)
        for part in parts:
            run = part.run
            self._lengths[run.slot] = run.end if part.decoded else None
            if run.slot in revocable:
                self._reachable[run.slot] = range(run.start, run.end + 1)
        return logits

    def draft(self, tokens: Mapping[int, int], *, logits: bool = False) -> dict[int, Draft]:
        """Proposals, by slot, for what follows the next token of each sequence; nothing is appended.

        `logits`: give those of the drafts as well. UsageError unless `drafting`; ContextError as for `step`.
        """
        manifest = self.engine.manifest
        block, noise = manifest.draft_block, manifest.draft_noise_token
        if not self.drafting or noise is None:
            raise UsageError("draft: open the session with drafting=True")
        runs = []
        for slot, token in tokens.items():
            run = self._run([token], slot)
            runs.append(Run(slot, run.start, np.concatenate([run.tokens, np.full(block - 1, noise, np.int32)])))
        read = ("drafts", "confidence", *["logits"] * logits)
        drafts: dict[int, Draft] = {}
        most = self._device.room("draft")[0] // block
        for begin in range(0, len(runs), most):
            some = runs[begin : begin + most]
            outputs = self._steps.draft(some, read)
            shaped = [outputs[name].reshape(len(some), block, -1).copy() for name in read]
            for number, run in enumerate(some):
                found, confidence, *rest = (array[number] for array in shaped)
                none = np.empty((0, manifest.vocabulary), np.float32)
                drafts[run.slot] = Draft(found[:, 0], confidence[:, 0], rest[0] if rest else none)
        return drafts

    def _append(self, feed: Feed) -> Floats:
        """Logits f32 [R, V] of all rows of a feed, step after step."""
        room, logits = self.room, []
        while (part := feed.take(room)) is not None:
            rows = self.advance([part])[0]
            if len(rows):
                logits.append(rows)
        return np.concatenate(logits)

    def _slot(self, slot: int) -> int:
        if not 0 <= slot < len(self._lengths):
            raise ContextError(f"slot: expected 0 to {len(self._lengths) - 1}, got {slot}")
        return slot

    def _schedule(self, mode: str | None, replay: int | None, chunk: int | None) -> Schedule:
        mode = self.default_mode if mode is None else mode
        schedule = schedules.find(mode)
        reason = schedule.why_not(self.engine)
        if reason is not None:
            raise UsageError(f"prefill {mode}: this engine cannot be run that way: {reason}: use full")
        for name, value in (("replay", replay), ("chunk", chunk)):
            if value is not None and value < 1:
                raise UsageError(f"{name}: expected at least 1 token, got {value}")
        return schedule

    def _run(self, tokens: Tokens, slot: int) -> Run:
        start = self.length(slot)
        images = tuple(image.moved(start) for image in self._images(tokens))
        return Run(slot, start, self._checked(tokens, start), self._kept[slot], images)

    def _images(self, tokens: Tokens) -> tuple[Placed, ...]:
        images = images_of(tokens)
        if images:
            image_rules(self.engine)
        return images

    def _checked(self, tokens: Tokens, start: int) -> Ints:
        """Token ids i32 [T] that fit behind `start` others; ContextError for what is none or too much."""
        try:
            ids = np.asarray(tokens)
        except ValueError as error:
            raise ContextError("prompt: expected token ids in one dimension, got a ragged list") from error
        if ids.ndim != 1:
            raise ContextError(f"prompt: expected token ids in one dimension, got {ids.ndim}")
        if not ids.size:
            raise ContextError("prompt: expected at least one token, got none")
        if ids.dtype.kind not in "iu":
            most = self.engine.manifest.vocabulary - 1
            raise ContextError(f"prompt: expected token ids of 0 to {most}, got {str(tokens)[:60]}")
        strange = np.flatnonzero((ids < 0) | (ids >= self.engine.manifest.vocabulary))
        if strange.size:
            place = int(strange[0])
            most = self.engine.manifest.vocabulary - 1
            raise ContextError(f"prompt: token {place}: expected an id of 0 to {most}, got {ids[place]}")
        if start + ids.size > self.max_context:
            raise ContextError(
                f"prompt: {ids.size} tokens do not fit: the context holds {self.max_context} and {start} are used: "
                "compile with a larger --max-context or shorten the prompt"
            )
        return ids.astype(np.int32)


def _last(run: Run) -> Part:
    """A run through the whole model, for the logits of its last token."""
    return Part(run, np.array([len(run.tokens) - 1], np.int32))
