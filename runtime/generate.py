"""Generation: a prompt in, tokens and text out, one at a time, until something says stop."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from v41c.errors import UsageError
from v41c.runtime.sampling import Sampler, Sampling
from v41c.runtime.session import Session, Tokens
from v41c.runtime.text import Text

StopReason = Literal["end token", "max new tokens", "context limit"]


@dataclass(frozen=True)
class Options:
    """How to generate. `mode`, `replay` and `chunk` as in `Session.prefill`; `stop_tokens` besides the end tokens."""

    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    mode: str | None = None
    replay: int | None = None
    chunk: int | None = None
    stop_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """UsageError for a negative number of tokens."""
        if self.max_new_tokens < 0:
            raise UsageError(f"max-new-tokens: expected 0 or more, got {self.max_new_tokens}")


@dataclass(frozen=True)
class Piece:
    """A generated token, None for the text that is left at the end; `text` is empty while a character is incomplete."""

    token: int | None
    text: str


@dataclass
class Result:
    """What a generation did. Complete when its iteration has ended; the end token is neither in `tokens` nor `text`.

    prefill_seconds: from the first call to the first token. decode_seconds: the steps after it, sampling included.
    """

    prompt_tokens: int = 0
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    stop: StopReason | None = None
    prefill_seconds: float = 0.0
    decode_steps: int = 0
    decode_seconds: float = 0.0

    @property
    def prefill_tokens_per_second(self) -> float:
        """Prompt tokens over prefill time; 0 before the prefill is done."""
        return self.prompt_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        """Decode steps over their time; 0 before the first."""
        return self.decode_steps / self.decode_seconds if self.decode_seconds else 0.0


class Generation:
    """Iterate once to generate; `result` fills up meanwhile.

    The sequence stays in its slot and can be continued, by the last generated token first: it has not been fed.
    """

    def __init__(
        self, session: Session, prompt: Tokens, options: Options, text: Text | None = None, *, slot: int = 0
    ) -> None:
        """Nothing runs yet. Without `text` the pieces have tokens only."""
        self.result = Result(prompt_tokens=len(prompt))
        self._session = session
        self._prompt = prompt
        self._options = options
        self._stream = text.stream() if text else None
        self._slot = slot
        self._stop_tokens = {*options.stop_tokens, *session.engine.manifest.eos_tokens}
        self._pieces = self._run()

    def __iter__(self) -> Iterator[Piece]:
        """Pieces until the end token, `max_new_tokens`, or a context without room for the last token's step."""
        return self._pieces

    def _run(self) -> Iterator[Piece]:
        result = self.result
        sampler = Sampler(self._options.sampling)
        token = self._prefill(sampler)
        if self._options.max_new_tokens == 0:
            result.stop = "max new tokens"
        while result.stop is None:
            if token in self._stop_tokens:
                result.stop = "end token"
                break
            yield self._piece(token, self._stream.push(token) if self._stream else "")
            result.stop = self._limit()
            if result.stop is None:
                began = time.perf_counter()
                token = sampler(self._session.decode(token, slot=self._slot))
                result.decode_seconds += time.perf_counter() - began
                result.decode_steps += 1
        rest = self._stream.finish() if self._stream else ""
        if rest:
            yield self._piece(None, rest)

    def _prefill(self, sampler: Sampler) -> int:
        options = self._options
        began = time.perf_counter()
        logits = self._session.prefill(
            self._prompt, slot=self._slot, mode=options.mode, replay=options.replay, chunk=options.chunk
        )
        token = sampler(logits)
        self.result.prefill_seconds = time.perf_counter() - began
        return token

    def _limit(self) -> StopReason | None:
        if len(self.result.tokens) == self._options.max_new_tokens:
            return "max new tokens"
        full = self._session.length(self._slot) == self._session.max_context
        return "context limit" if full else None

    def _piece(self, token: int | None, text: str) -> Piece:
        if token is not None:
            self.result.tokens.append(token)
        self.result.text += text
        return Piece(token, text)
