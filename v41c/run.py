"""The driver of `v41c run`: an engine continues a prompt. Imports neither torch nor a compiler."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from v41c.errors import UsageError
from v41c.prefix_cache import PrefixCache
from v41c.runtime.artifact import Engine, load
from v41c.runtime.drafting import DraftReport
from v41c.runtime.generate import Generation
from v41c.runtime.request import Options, Result
from v41c.runtime.sampling import Sampling
from v41c.runtime.session import Session
from v41c.runtime.text import Text
from v41c.runtime.vision import encode, with_files

#: how a prompt file is spelled that means standard input
STANDARD_INPUT = "-"


@dataclass(frozen=True)
class Prompt:
    """What is continued: exactly one of a text, a file of UTF-8 text (`-`: standard input), or token ids.

    `images` are files, one for each `<image>` in the text or image token, in order.
    """

    text: str | None = None
    file: str | None = None
    tokens: tuple[int, ...] | None = None
    images: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """UsageError unless exactly one is given."""
        given = [self.text, self.file, self.tokens]
        if sum(value is not None for value in given) != 1:
            raise UsageError("prompt: expected exactly one of --prompt, --prompt-file and --tokens")

    def ids(self, text: Text | None, engine: Engine) -> Sequence[int]:
        """Token ids, the begin token in front of a text, with its images.

        UsageError for a prompt that is empty or not UTF-8, and as `with_images` raises.
        """
        return with_files(self._ids(text, engine), self.images, engine)

    def _ids(self, text: Text | None, engine: Engine) -> list[int]:
        if self.tokens is not None:
            if not self.tokens:
                raise UsageError("prompt: expected token ids, got none")
            return list(self.tokens)
        prompt = self.text if self.file is None else _decoded(read_bytes(self.file), self.file)
        return encode(text or Text(engine), prompt or "", engine)


@dataclass(frozen=True)
class RunReport:
    """What a run did. `finish_reason` is why it stopped; seconds are wall time; `mode` is the prefill schedule."""

    engine: str
    mode: str
    prompt_tokens: int
    tokens: list[int]
    text: str | None
    finish_reason: str | None
    load_seconds: float
    prefill_seconds: float
    decode_seconds: float
    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    block_evaluations: int
    memory_bytes: int
    drafts: DraftReport | None
    cached_tokens: int
    replayed_tokens: int

    def to_json(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        return asdict(self) | {"drafts": None if self.drafts is None else self.drafts.to_json()}

    def summary(self) -> str:
        """Token counts and timings, one line each, and what drafting did if it was asked for."""
        return "\n".join(
            [
                f"loaded in {self.load_seconds:.2f} s",
                f"prompt: {self.prompt_tokens} tokens in {self.prefill_seconds:.2f} s "
                f"({self.prefill_tokens_per_second:.0f} tokens/s, {self.mode}){self._reused()}",
                f"generated: {len(self.tokens)} tokens, stopped by {self.finish_reason}{self._decode_speed()}",
                *([] if self.drafts is None else [self.drafts.summary()]),
            ]
        )

    def _reused(self) -> str:
        """What of the prompt was in the prefix cache, if anything was."""
        if not self.cached_tokens:
            return ""
        return f"; {self.cached_tokens} of them were cached, {self.replayed_tokens} replayed"

    def _decode_speed(self) -> str:
        """Speed of decode, which makes every token but the first: that one comes from prefill."""
        if len(self.tokens) < 2:
            return ""
        return f"; decode took {self.decode_seconds:.2f} s ({self.decode_tokens_per_second:.0f} tokens/s)"


def run(
    engine: str | Path,
    prompt: Prompt,
    options: Options,
    write: Callable[[str], None] = lambda text: None,
    cache: PrefixCache | None = None,
) -> RunReport:
    """Generate, handing out the text as it comes: token ids with a space behind each where there is no tokenizer.

    Raises ArtifactError, TokenizerError, ContextError or UsageError, before anything is written.
    """
    began = time.perf_counter()
    loaded = load(engine)
    text = Text(loaded) if loaded.tokenizer_path is not None else None
    ids = prompt.ids(text, loaded)
    session = open_session(loaded, options)
    mode = options.mode or session.default_mode
    require_replay(options, session)
    generation = Generation(session, ids, options, text, reuse=None if cache is None else cache.open(session))
    load_seconds = time.perf_counter() - began
    for piece in generation:
        if text is not None:
            write(piece.text)
        elif piece.token is not None:
            write(f"{piece.token} ")
    return _report(loaded, session, mode, generation.result, load_seconds, text is not None)


def open_session(engine: Engine, options: Options, slots: int = 1) -> Session:
    """A session that can draft where that is asked for and the engine can, and then knows its times."""
    session = Session(engine, slots=slots, drafting=options.draft != "off" and bool(engine.programs("draft")))
    if options.draft == "auto" and session.draft_block:
        session.times()
    return session


def require_replay(options: Options, session: Session) -> None:
    """UsageError for a replay length with a schedule that replays nothing."""
    if (options.mode or session.default_mode) == "full" and options.replay is not None:
        raise UsageError("replay: expected with prefill ced only: full runs every layer over every token")


def require_temperature(sampling: Sampling) -> None:
    """UsageError for filters that are asked for and do nothing: greedy takes the likeliest token."""
    if sampling.temperature == 0 and (sampling.top_p < 1 or sampling.top_k or sampling.min_p):
        raise UsageError("temperature: expected above 0 beside top-p, top-k and min-p: 0 is greedy")


def _report(
    engine: Engine, session: Session, mode: str, result: Result, load_seconds: float, has_text: bool
) -> RunReport:
    return RunReport(
        engine=str(engine.path),
        mode=mode,
        prompt_tokens=result.prompt_tokens,
        tokens=result.tokens,
        text=result.text if has_text else None,
        finish_reason=result.stop,
        load_seconds=load_seconds,
        prefill_seconds=result.prefill_seconds,
        decode_seconds=result.decode_seconds,
        prefill_tokens_per_second=result.prefill_tokens_per_second,
        decode_tokens_per_second=result.decode_tokens_per_second,
        block_evaluations=session.block_evaluations,
        memory_bytes=session.memory_bytes,
        drafts=result.drafts,
        cached_tokens=result.reused.cached_tokens,
        replayed_tokens=result.reused.replayed_tokens,
    )


def read_bytes(file: str) -> bytes:
    """A file, `-` being standard input; UsageError when it cannot be read."""
    if not file:
        raise UsageError("prompt: expected the name of a file, got an empty one")
    if file != STANDARD_INPUT:
        try:
            return Path(file).read_bytes()
        except OSError as error:
            raise UsageError(f"{file}: cannot be read: {error.strerror}") from error
    if sys.stdin is None:
        raise UsageError("standard input: expected a prompt, it is closed")
    return sys.stdin.buffer.read()


def shown(file: str) -> str:
    """What messages call a file."""
    return "standard input" if file == STANDARD_INPUT else file


def _decoded(content: bytes, file: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{shown(file)}: expected UTF-8, got byte 0x{content[error.start]:02x} at {error.start}"
        ) from error
