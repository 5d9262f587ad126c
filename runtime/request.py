"""A request: a prompt, how to continue it, and what has come of it, token by token."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from v41c.errors import UsageError, V41CError
from v41c.runtime.drafting import DraftReport
from v41c.runtime.reuse import Reused
from v41c.runtime.sampling import Logprobs, Sampler, Sampling, logprobs
from v41c.runtime.session import Tokens
from v41c.runtime.steps import Floats
from v41c.runtime.text import StopStrings, Text

StopReason = Literal["end token", "stop string", "max new tokens", "context limit", "cancelled"]


@dataclass(frozen=True)
class Options:
    """How to generate. `mode`, `replay` and `chunk` as in `Session.prefill`; `stop_tokens` besides the end tokens.

    stop_strings: end the text before the first of them, wherever tokens begin and end; they need a tokenizer.
    logprobs: so many alternatives to each token, with log probabilities; None for none at all.
    draft: let the model verify drafts of its draft head, which changes speed and no token: `off`; so many in each step;
    `auto`, as many as make the most tokens per second on this machine, none where that is none. It takes a session for
    drafting, and times, which an empty session measures if they are not known: see `Session.times`.
    """

    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    mode: str | None = None
    replay: int | None = None
    chunk: int | None = None
    stop_tokens: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    logprobs: int | None = None
    draft: int | str = "off"

    def __post_init__(self) -> None:
        """UsageError for a number out of range, or an empty string that every text would stop before."""
        for name, value in (("max-new-tokens", self.max_new_tokens), ("logprobs", self.logprobs)):
            if value is not None and value < 0:
                raise UsageError(f"{name}: expected 0 or more, got {value}")
        if self.draft not in ("auto", "off") and (isinstance(self.draft, str) or self.draft < 1):
            raise UsageError(f"draft: expected auto, off or a number of tokens, got {self.draft}")
        if "" in self.stop_strings:
            raise UsageError("stop: expected strings of at least one character, got an empty one")


@dataclass(frozen=True)
class Piece:
    """A generated token, None for the text that is left at the end.

    `text` is empty while a character is incomplete, or while it may be the beginning of a stop string.
    """

    token: int | None
    text: str
    logprobs: Logprobs | None = None


@dataclass
class Result:
    """What a generation did. Complete when its iteration has ended; the end token is neither in `tokens` nor `text`.

    prefill_seconds: from the first step, or the look for a prefix, to the first token. decode_seconds: the steps after
    it, sampling included; decode_tokens: what they chose, an end token included. drafts: what drafting did, None if it
    was off. reused: what of the prompt was there before.
    """

    prompt_tokens: int = 0
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    stop: StopReason | None = None
    prefill_seconds: float = 0.0
    decode_steps: int = 0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    drafts: DraftReport | None = None
    reused: Reused = field(default_factory=Reused)

    @property
    def prefill_tokens_per_second(self) -> float:
        """Prompt tokens over prefill time; 0 before the prefill is done."""
        return self.prompt_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        """Tokens of decode steps over their time; 0 before the first."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0


class Request:
    """One prompt on its way through a batch. `result` fills up meanwhile; `error` is why it failed, if it did."""

    def __init__(self, prompt: Tokens, options: Options, text: Text | None = None) -> None:
        """Without `text` the pieces have tokens only. UsageError for stop strings without it."""
        if options.stop_strings and text is None:
            raise UsageError("stop: expected an engine with a tokenizer: without text there are no stop strings")
        self.prompt = prompt
        self.options = options
        self.result = Result(prompt_tokens=len(prompt))
        self.error: V41CError | None = None
        self._sampler = Sampler(options.sampling)
        self._stream = text.stream() if text else None
        self._stop = StopStrings(options.stop_strings)

    @property
    def done(self) -> bool:
        """Whether nothing more will come."""
        return self.result.stop is not None or self.error is not None

    @property
    def decoding(self) -> bool:
        """Whether its prompt has been fed."""
        return bool(self.result.tokens)

    def choose(self, logits: Floats, end_tokens: frozenset[int], *, full: bool) -> list[Piece]:
        """The next token for logits f32 [V], as a piece, and behind the last one whatever text is left.

        `full`: the sequence has no room for the step of another token. ArtifactError for logits that are no numbers.
        """
        token = self._sampler(logits)
        if self.options.max_new_tokens == 0:
            return self.end("max new tokens")
        if token in end_tokens or token in self.options.stop_tokens:
            return self.end("end token")
        self.result.tokens.append(token)
        text = self._stop.push(self._stream.push(token)) if self._stream else ""
        self.result.text += text
        likely = None if self.options.logprobs is None else logprobs(logits, token, self.options.logprobs)
        piece = Piece(token, text, likely)
        if self._stop.found:
            self.result.stop = "stop string"
        elif len(self.result.tokens) == self.options.max_new_tokens:
            return [piece, *self.end("max new tokens")]
        elif full:
            return [piece, *self.end("context limit")]
        return [piece]

    def end(self, reason: StopReason) -> list[Piece]:
        """Stop here; a piece of the text that was held back, if any was."""
        self.result.stop = reason
        rest = self._stop.push(self._stream.finish()) + self._stop.finish() if self._stream else ""
        self.result.text += rest
        return [Piece(None, rest)] if rest else []
