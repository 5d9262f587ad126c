"""The driver of `v41c run --prompts`: an engine continues many prompts at once. Imports no torch and no compiler."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from v41c.errors import UsageError, V41CError
from v41c.prefix_cache import PrefixCache
from v41c.run import open_session, read_bytes, require_replay, require_temperature, shown
from v41c.runtime.artifact import Engine, load
from v41c.runtime.batch import Batch
from v41c.runtime.drafting import DraftReport, added_up
from v41c.runtime.request import Options, Request
from v41c.runtime.sampling import Sampling
from v41c.runtime.text import Text
from v41c.runtime.vision import encode, with_files


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    """A line of a file of prompts: exactly one of `prompt` and `tokens`, and options where they differ."""

    prompt: str | None = None
    tokens: list[int] | None = None
    max_new_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: list[str] | None = None
    images: list[str] | None = None

    def options(self, options: Options) -> Options:
        """The options of every prompt, with what this line changes. UsageError for filters of its own beside greedy."""
        names = ("temperature", "top_k", "top_p", "min_p", "seed")
        changed = {name: value for name in names if (value := getattr(self, name)) is not None}
        require_temperature(replace(Sampling(options.sampling.temperature), **changed))
        most = options.max_new_tokens if self.max_new_tokens is None else self.max_new_tokens
        sampling = replace(options.sampling, **changed)
        return replace(options, max_new_tokens=most, sampling=sampling, stop_strings=tuple(self.stop or ()))

    def ids(self, text: Text | None, engine: Engine) -> Sequence[int]:
        """Token ids of the prompt, with its images."""
        if (self.prompt is None) == (self.tokens is None):
            raise UsageError("expected exactly one of prompt and tokens")
        ids = encode(text or Text(engine), self.prompt or "", engine) if self.tokens is None else self.tokens
        return with_files(ids, self.images or (), engine)


@dataclass(frozen=True)
class Continuation:
    """What became of one prompt; `error` is why it failed, if it did."""

    prompt_tokens: int
    tokens: list[int]
    text: str | None
    finish_reason: str | None
    error: str | None
    cached_tokens: int
    replayed_tokens: int

    def to_json(self) -> dict[str, Any]:
        """The object of its line."""
        return asdict(self)


@dataclass(frozen=True)
class PromptsReport:
    """What a run did; seconds are wall time."""

    prompts: int
    failed: int
    prompt_tokens: int
    tokens: int
    slots: int
    load_seconds: float
    seconds: float
    memory_bytes: int
    drafts: DraftReport | None
    cached_tokens: int
    replayed_tokens: int

    def summary(self) -> str:
        """Counts and timings, one line each."""
        speed = (self.prompt_tokens + self.tokens) / self.seconds if self.seconds else 0.0
        failed = f", {self.failed} failed" if self.failed else ""
        cached = f"; {self.cached_tokens} cached, {self.replayed_tokens} replayed" if self.cached_tokens else ""
        return "\n".join(
            [
                f"loaded in {self.load_seconds:.2f} s",
                f"{self.prompts} prompts of {self.prompt_tokens} tokens, up to {self.slots} at once{failed}{cached}",
                f"generated: {self.tokens} tokens in {self.seconds:.2f} s ({speed:.0f} tokens/s, prompts included)",
                *([] if self.drafts is None else [self.drafts.summary()]),
            ]
        )


def run_prompts(
    engine: str | Path,
    file: str,
    options: Options,
    slots: int | None = None,
    write: Callable[[Continuation], None] = lambda result: None,
    progress: Callable[[str], None] = lambda text: None,
    cache: PrefixCache | None = None,
) -> PromptsReport:
    """Continue every prompt of a file (`-`: standard input), up to `slots` at once, the engine's number when None.

    Results are handed out in the order of the prompts, each as soon as it and all before it are there. Raises
    ArtifactError, TokenizerError, ContextError or UsageError, before anything is written.
    """
    began = time.perf_counter()
    loaded = load(engine)
    text = Text(loaded) if loaded.tokenizer_path is not None else None
    requests = _requests(file, options, text, loaded)
    most = min(loaded.manifest.slots, max(1, len(requests))) if slots is None else slots
    session = open_session(loaded, options, most)
    require_replay(options, session)
    batch = Batch(session, reuse=None if cache is None else cache.open(session))
    for number, request in requests:
        with _named(file, number):
            batch.add(request)
    load_seconds, began = time.perf_counter() - began, time.perf_counter()
    asked = [request for _, request in requests]
    for request in _in_order(batch, asked, progress):
        write(_continuation(request, text is not None))
    return PromptsReport(
        prompts=len(asked),
        failed=sum(request.error is not None for request in asked),
        prompt_tokens=sum(request.result.prompt_tokens for request in asked),
        tokens=sum(len(request.result.tokens) for request in asked),
        slots=most,
        load_seconds=load_seconds,
        seconds=time.perf_counter() - began,
        memory_bytes=session.memory_bytes,
        drafts=added_up(request.result.drafts for request in asked),
        cached_tokens=sum(request.result.reused.cached_tokens for request in asked),
        replayed_tokens=sum(request.result.reused.replayed_tokens for request in asked),
    )


def _in_order(batch: Batch, requests: Sequence[Request], progress: Callable[[str], None]) -> Iterator[Request]:
    """Requests in their order, each when it and all before it are done."""
    given = done = tokens = 0
    while given < len(requests):
        for event in batch.step():
            tokens += sum(piece.token is not None for piece in event.pieces)
            done += event.request.done
        progress(f"{done} of {len(requests)} prompts done, {batch.running} running, {tokens} tokens")
        while given < len(requests) and requests[given].done:
            yield requests[given]
            given += 1


def _continuation(request: Request, has_text: bool) -> Continuation:
    result = request.result
    return Continuation(
        prompt_tokens=result.prompt_tokens,
        tokens=result.tokens,
        text=result.text if has_text else None,
        finish_reason=result.stop,
        error=None if request.error is None else str(request.error),
        cached_tokens=result.reused.cached_tokens,
        replayed_tokens=result.reused.replayed_tokens,
    )


def _requests(file: str, options: Options, text: Text | None, engine: Engine) -> list[tuple[int, Request]]:
    """The request of every line that is not blank, by the line's number."""
    found = []
    for number, content in enumerate(read_bytes(file).split(b"\n"), 1):
        if not content.strip():
            continue
        with _named(file, number):
            line = _parsed(content)
            found.append((number, Request(line.ids(text, engine), line.options(options), text)))
    if not found:
        raise UsageError(f"{shown(file)}: expected a prompt in every line, got none")
    return found


@contextmanager
def _named(file: str, number: int) -> Iterator[None]:
    """Errors within say which line they are about."""
    try:
        yield
    except V41CError as error:
        raise type(error)(f"{shown(file)}: line {number}: {error}") from error


def _parsed(content: bytes) -> _Line:
    try:
        return msgspec.json.decode(content, type=_Line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f'expected {{"prompt": "…"}} or {{"tokens": […]}}: {error}') from error
