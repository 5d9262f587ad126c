"""A batch: requests that share the steps of a session, joining and leaving between them."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from v41c.errors import ContextError, UsageError, V41CError
from v41c.runtime.draft_policy import Policy
from v41c.runtime.drafter import Drafter, check_drafts
from v41c.runtime.drafting import accept
from v41c.runtime.request import Piece, Request
from v41c.runtime.reuse import Reuse
from v41c.runtime.session import Session
from v41c.runtime.steps import Feed, Floats, Part, Room


@dataclass(frozen=True, eq=False)
class Event:
    """What a step did for a request: pieces in order, none for one that failed; `request.done` says if it is over."""

    request: Request
    pieces: list[Piece]


@dataclass(eq=False)
class _Running:
    """A request in its slot, and what of it is still to be fed; `whole`: nothing was in the slot before its prompt."""

    request: Request
    slot: int
    feed: Feed
    whole: bool
    policy: Policy | None


class Batch:
    """Requests of one session, which nobody else uses meanwhile. For one thread.

    A sequence has all the memory it can come to need from the moment it gets a slot; requests without one wait, first
    come, first served. Each step takes a token of every sequence that decodes, drafts behind it where that is asked
    for, and fills what is left of the token budget with prompts, in order of arrival. A sequence's tokens do not depend
    on what shares its steps. With `reuse`, prompts begin with what earlier sequences left; their replays share steps.
    """

    def __init__(self, session: Session, *, token_budget: int | None = None, reuse: Reuse | None = None) -> None:
        """token_budget: tokens of one step, as many as the engine takes when None. UsageError below one per slot."""
        if token_budget is not None and token_budget < session.slots:
            raise UsageError(f"token-budget: expected at least {session.slots}, a token per slot, got {token_budget}")
        self._session = session
        self._token_budget = session.room.tokens if token_budget is None else token_budget
        self._reuse = reuse
        self._end_tokens = frozenset(session.engine.manifest.eos_tokens)
        self._drafter = Drafter(session)
        self._waiting: deque[Request] = deque()
        self._running: list[_Running] = []
        self._free = list(reversed(range(session.slots)))

    @property
    def waiting(self) -> int:
        """Requests without a slot."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Requests with a slot."""
        return len(self._running)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self._running and not self._waiting

    def add(self, request: Request, *, slot: int | None = None) -> None:
        """Let a request join. With `slot` it continues the sequence there, at once; else it begins a new one.

        ContextError or UsageError, before any work, as `Session.feed` raises, for a slot that is not free, and for
        drafts that the session cannot make.
        """
        options = request.options
        check_drafts(self._session, options.draft)
        if slot is None:
            self._session.check(request.prompt, mode=options.mode, replay=options.replay, chunk=options.chunk)
            self._waiting.append(request)
            return
        if slot not in self._free:
            raise ContextError(f"slot: expected one of {self._free} that are free, got {slot}")
        self._running.append(self._start(request, slot))
        self._free.remove(slot)

    def cancel(self, request: Request) -> list[Piece]:
        """Let a request leave, waiting or running; the piece of the text that was held back, if any was."""
        if request.done:
            return []
        if request in self._waiting:
            self._waiting.remove(request)
        pieces = request.end("cancelled")
        self._leave()
        return pieces

    def step(self) -> list[Event]:
        """One step for every sequence there is room for: what came of it, by request. Nothing when idle.

        What fails for one sequence alone ends its request with an `error`; a step that fails ends those that it was
        for.
        """
        refused = self._admit()
        began = time.perf_counter()
        taken: list[tuple[_Running, Part]] = []
        try:
            self._propose()
            taken = self._take()
            if not taken:
                return refused
            drafted = [running.slot for running, _ in taken if self._drafter.proposal(running.slot).tokens]
            logits = self._session.advance([part for _, part in taken], revocable=drafted)
        except V41CError as error:
            failed = [running for running, _ in taken] or self._running
            events = [_failed(running.request, error) for running in failed]
            alone = False
        else:
            alone = all(running.request.decoding for running, _ in taken)
            events = [self._event(running, rows) for (running, _), rows in zip(taken, logits, strict=True)]
        seconds = time.perf_counter() - began
        for event in events:
            _account(event, seconds)
        self._drafter.learn(seconds if alone else None)
        self._leave()
        return refused + events

    def _propose(self) -> None:
        """Ask for drafts: they may fill a step, or half of what is left of it while prompts wait for their turn."""
        decoding = {one.slot: one.request for one in self._running if one.request.decoding}
        policies = {one.slot: one.policy for one in self._running if one.policy is not None}
        if self._drafter.begin(policies, decoding):
            most = self._session.room
            left = min(self._token_budget, most.tokens, most.rows) - len(decoding)
            self._drafter.draft(left if len(decoding) == len(self._running) else left // 2)

    def _admit(self) -> list[Event]:
        """Give free slots to those who wait; events of those who could not begin."""
        refused = []
        while self._waiting and self._free:
            request, slot = self._waiting.popleft(), self._free.pop()
            self._session.reset(slot)
            try:
                self._running.append(self._start(request, slot))
            except V41CError as error:
                refused.append(_failed(request, error))
                self._free.append(slot)
        return refused

    def _start(self, request: Request, slot: int) -> _Running:
        options = request.options
        policy = self._drafter.policy(options.draft)
        prompt, whole = request.prompt, not self._session.length(slot)
        if self._reuse and whole:
            began = time.perf_counter()
            request.result.reused = self._reuse.begin(prompt, slot=slot, mode=options.mode, replay=options.replay)
            request.result.prefill_seconds += time.perf_counter() - began
            prompt = prompt[self._session.length(slot) :]
        feed = self._session.feed(prompt, slot=slot, mode=options.mode, replay=options.replay, chunk=options.chunk)
        return _Running(request, slot, feed, whole, policy)

    def _take(self) -> list[tuple[_Running, Part]]:
        """What the next step does: sequences that decode come first, the others in order of arrival."""
        most = self._session.room
        room = Room(min(self._token_budget, most.tokens), most.rows)
        taken = []
        for running in sorted(self._running, key=lambda running: not running.request.decoding):
            drafts = self._drafter.proposal(running.slot).tokens
            if drafts:
                tokens = [running.request.result.tokens[-1], *drafts]
                part: Part | None = self._session.verification(tokens, slot=running.slot)
            else:
                part = running.feed.take(room)
            if part is not None:
                room = room.after(part)
                taken.append((running, part))
        return taken

    def _event(self, running: _Running, logits: Floats) -> Event:
        """What logits f32 [R, V] of a part mean: nothing before the prompt's last token, else the next token or tokens.

        Drafts that are not accepted are taken back, and those behind the end of the sequence.
        """
        request, slot, session = running.request, running.slot, self._session
        if not len(logits):
            return Event(request, [])
        drafts = self._drafter.proposal(slot).tokens
        fed = begin = session.length(slot) - len(drafts)
        decoding, pieces = request.decoding, list[Piece]()

        def choose(row: Floats) -> int | None:
            nonlocal fed
            pieces.extend(request.choose(row, self._end_tokens, full=fed == session.max_context))
            fed += 1
            return None if request.done else request.result.tokens[-1]

        try:
            accepted = accept(logits[-1 - len(drafts) :], drafts, choose)
        except V41CError as error:
            return _failed(request, error)
        if accepted < len(drafts):
            session.rewind(begin + accepted, slot=slot)
        if decoding:
            request.result.decode_tokens += accepted + 1
            self._drafter.count(slot, request, accepted)
        if not request.done:
            running.feed = session.feed(request.result.tokens[-1:], slot=slot, mode="decode")
        return Event(request, pieces)

    def _leave(self) -> None:
        """Free the slots of requests that are done; their sequences stay until others need the place."""
        for running in self._running:
            if running.request.done:
                self._keep(running)
                self._free.append(running.slot)
        self._running = [running for running in self._running if not running.request.done]

    def _keep(self, running: _Running) -> None:
        """Let a sequence leave what later ones can begin with, if its prompt was fed to the end."""
        request = running.request
        fed = request.error is None and (request.decoding or running.feed.done)
        if self._reuse and running.whole and fed:
            self._reuse.end(request.prompt, request.result.tokens, slot=running.slot)


def _failed(request: Request, error: V41CError) -> Event:
    request.error = error
    return Event(request, [])


def _account(event: Event, seconds: float) -> None:
    """Add a step's time to the phase it belonged to."""
    result = event.request.result
    decoded = len(result.tokens) - sum(piece.token is not None for piece in event.pieces)
    if decoded:
        result.decode_steps += 1
        result.decode_seconds += seconds
    else:
        result.prefill_seconds += seconds
