"""What is answered, as the OpenAI API spells it: whole, or as the chunks of a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any, Protocol

from v41c.runtime.request import Piece, Result, StopReason
from v41c.runtime.text import Text

Json = dict[str, Any]
_FINISH: dict[StopReason | None, str] = {
    "end token": "stop",
    "stop string": "stop",
    "max new tokens": "length",
    "context limit": "length",
}


def usage(result: Result) -> Json:
    """Tokens in and out, and those of the prompt that were cached."""
    prompt, completion = result.prompt_tokens, len(result.tokens)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": result.reused.cached_tokens},
    }


class Reply(Protocol):
    """A kind of answer, for one request."""

    def whole(self, pieces: Sequence[Piece], result: Result) -> Json:
        """Everything at once."""

    def begin(self) -> list[Json]:
        """Chunks before the first piece."""

    def chunk(self, pieces: Sequence[Piece]) -> Json:
        """The chunk of pieces that have come together."""

    def end(self, result: Result) -> Json:
        """The chunk that says why the text ends."""

    def count(self, result: Result) -> Json:
        """The chunk that says how many tokens there were."""


class _Reply:
    def __init__(self, kind: str, prefix: str, model: str, text: Text) -> None:
        self._head: Json = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }
        self._text = text

    def _object(self, choice: Json | None, **more: object) -> Json:
        return {**self._head, "choices": [] if choice is None else [{"index": 0, **choice}], **more}

    def _bytes(self, token: int) -> bytes:
        return self._text.token_bytes(token)

    def _string(self, token: int) -> str:
        return self._bytes(token).decode(errors="replace")


class CompletionReply(_Reply):
    """Of /v1/completions."""

    def __init__(self, model: str, text: Text) -> None:
        super().__init__("text_completion", "cmpl", model, text)
        self._offset = 0

    def whole(self, pieces: Sequence[Piece], result: Result) -> Json:
        """As `Reply.whole`."""
        return self._object(self._choice(pieces, _FINISH.get(result.stop)), usage=usage(result))

    def begin(self) -> list[Json]:
        """As `Reply.begin`."""
        return []

    def chunk(self, pieces: Sequence[Piece]) -> Json:
        """As `Reply.chunk`."""
        return self._object(self._choice(pieces, None))

    def end(self, result: Result) -> Json:
        """As `Reply.end`."""
        return self._object({"text": "", "logprobs": None, "finish_reason": _FINISH.get(result.stop)})

    def count(self, result: Result) -> Json:
        """As `Reply.count`."""
        return self._object(None, usage=usage(result))

    def _choice(self, pieces: Sequence[Piece], reason: str | None) -> Json:
        text = "".join(piece.text for piece in pieces)
        return {"text": text, "logprobs": self._logprobs(pieces), "finish_reason": reason}

    def _logprobs(self, pieces: Sequence[Piece]) -> Json | None:
        tokens, own, top, offsets = list[str](), list[float](), list[Json](), list[int]()
        for piece in pieces:
            if piece.token is not None and piece.logprobs is not None:
                tokens.append(self._string(piece.token))
                own.append(piece.logprobs.chosen)
                top.append({self._string(token): value for token, value in piece.logprobs.top})
                offsets.append(self._offset)
                self._offset += len(tokens[-1])
        if not tokens:
            return None
        return {"tokens": tokens, "token_logprobs": own, "top_logprobs": top, "text_offset": offsets}


class ChatReply(_Reply):
    """Of /v1/chat/completions."""

    def __init__(self, model: str, text: Text, *, stream: bool) -> None:
        super().__init__("chat.completion.chunk" if stream else "chat.completion", "chatcmpl", model, text)

    def whole(self, pieces: Sequence[Piece], result: Result) -> Json:
        """As `Reply.whole`."""
        text = "".join(piece.text for piece in pieces)
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"message": message, "logprobs": self._logprobs(pieces), "finish_reason": _FINISH.get(result.stop)}
        return self._object(choice, usage=usage(result))

    def begin(self) -> list[Json]:
        """As `Reply.begin`."""
        return [self._delta({"role": "assistant", "content": ""})]

    def chunk(self, pieces: Sequence[Piece]) -> Json:
        """As `Reply.chunk`."""
        return self._delta({"content": "".join(piece.text for piece in pieces)}, self._logprobs(pieces))

    def end(self, result: Result) -> Json:
        """As `Reply.end`."""
        return self._delta({}, reason=_FINISH.get(result.stop))

    def count(self, result: Result) -> Json:
        """As `Reply.count`."""
        return self._object(None, usage=usage(result))

    def _delta(self, delta: Json, logprobs: Json | None = None, reason: str | None = None) -> Json:
        return self._object({"delta": delta, "logprobs": logprobs, "finish_reason": reason})

    def _logprobs(self, pieces: Sequence[Piece]) -> Json | None:
        content = []
        for piece in pieces:
            if piece.token is not None and piece.logprobs is not None:
                top = [self._likely(token, value) for token, value in piece.logprobs.top]
                content.append(self._likely(piece.token, piece.logprobs.chosen) | {"top_logprobs": top})
        return {"content": content, "refusal": None} if content else None

    def _likely(self, token: int, value: float) -> Json:
        return {"token": self._string(token), "logprob": value, "bytes": list(self._bytes(token))}
