"""The application: paths, limits, and what each request becomes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from v41c.errors import ContextError, RefusedError, UsageError, V41CError
from v41c.runtime.request import Options, Request
from v41c.runtime.reuse import Reuse
from v41c.runtime.session import Session
from v41c.runtime.text import Text
from v41c.runtime.vision import encode, with_contents
from v41c.serve.answer import Answer, error_json, status_of
from v41c.serve.metrics import Metrics
from v41c.serve.protocol import Body, ChatBody, CompletionBody, Kind, parse
from v41c.serve.replies import ChatReply, CompletionReply, Json, Reply
from v41c.serve.template import ChatTemplate
from v41c.serve.worker import Worker


@dataclass(frozen=True)
class Limits:
    """What a server takes: bytes of a body, tokens of an answer, requests that wait, seconds.

    max_tokens: of one answer, what the context holds when None. seconds: for a request from its body to its last token.
    send_seconds: for a client to read on. body_seconds: for a body to arrive, and for the head
    before it.
    """

    body_bytes: int = 1 << 20
    max_tokens: int | None = None
    waiting: int = 64
    seconds: float = 600.0
    send_seconds: float = 30.0
    body_seconds: float = 30.0

    def __post_init__(self) -> None:
        """UsageError for a time that is none."""
        if not 0 < self.seconds < math.inf:
            raise UsageError(f"timeout: expected seconds, more than 0, got {self.seconds:g}")


class Service:
    """An engine's session behind HTTP: `app` is the ASGI application. `abort` drops the connection of a scope.

    token_budget, reuse: see `Batch`; draft: see `Options`.
    """

    def __init__(
        self,
        session: Session,
        text: Text,
        template: ChatTemplate | None,
        name: str,
        limits: Limits,
        *,
        token_budget: int | None = None,
        reuse: Reuse | None = None,
        draft: int | str = "off",
        created: int = 0,
    ) -> None:
        self.worker = Worker(session, token_budget=token_budget, reuse=reuse)
        self.metrics = Metrics(lambda: self.worker.running, lambda: self.worker.waiting)
        self.abort: Callable[[Scope], None] = lambda scope: None
        self._session, self._text, self._template = session, text, template
        self._name, self._limits, self._draft, self._created = name, limits, draft, created
        self._open = 0
        self._stopping = False
        routes = [
            Route("/health", self._health),
            Route("/metrics", self._metrics),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._model),
            Route("/v1/completions", self._completion, methods=["POST"]),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
        ]
        handlers = {HTTPException: _http_error, V41CError: self._refused, ClientDisconnect: _nobody}
        self.app = Starlette(routes=routes, exception_handlers=handlers)

    def stop(self) -> None:
        """Refuse new requests from now on; those that run go on."""
        self._stopping = True

    def refuse_all(self) -> None:
        """End what still runs."""
        self.worker.refuse_all(_stopped())

    def close(self) -> None:
        """Stop the worker."""
        self.worker.close()

    async def _health(self, request: HttpRequest) -> Response:
        if self.worker.failure is not None:
            return _json({"status": "failed", "reason": str(self.worker.failure)}, 503)
        if self._stopping:
            return _json({"status": "stopping"}, 503)
        return _json({"status": "ok"})

    async def _metrics(self, request: HttpRequest) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _models(self, request: HttpRequest) -> Response:
        return _json({"object": "list", "data": [self._about()]})

    async def _model(self, request: HttpRequest) -> Response:
        self._require_model(request.path_params["name"])
        return _json(self._about())

    def _about(self) -> Json:
        return {"id": self._name, "object": "model", "created": self._created, "owned_by": "v41c"}

    async def _completion(self, http: HttpRequest) -> _Asgi:
        body = await self._body(http, CompletionBody)
        content = body.content()
        try:
            ids = self._text.encode(content) if isinstance(content, str) else content
        except UsageError as error:
            raise RefusedError(str(error), param="prompt") from error
        return self._answer(body, ids, CompletionReply(self._name, self._text))

    async def _chat(self, http: HttpRequest) -> _Asgi:
        body = await self._body(http, ChatBody)
        if self._template is None:
            raise RefusedError(
                "this engine has no chat template: use /v1/completions, or compile a checkpoint folder with "
                "chat_template.jinja or tokenizer_config.json",
                code="no_chat_template",
            )
        prompt, images = self._template.prompt(body.plain_messages()), body.images()
        try:
            ids = await asyncio.to_thread(self._seen, prompt, images) if images else self._text.encode(prompt)
        except UsageError as error:
            raise RefusedError(str(error), param="messages") from error
        return self._answer(body, ids, ChatReply(self._name, self._text, stream=bool(body.stream)))

    def _seen(self, prompt: str, images: Mapping[str, bytes]) -> Sequence[int]:
        """Token ids of a text with images."""
        engine = self._session.engine
        return with_contents(encode(self._text, prompt, engine), images, engine)

    async def _body(self, http: HttpRequest, kind: type[Kind]) -> Kind:
        """The body of a request, if there is a place for the request."""
        self._require_place()
        body = parse(await self._content(http), kind)
        self._require_model(body.model)
        return body

    def _require_place(self) -> None:
        if self._stopping:
            raise _stopped()
        if self._open >= self._session.slots + self._limits.waiting:
            raise RefusedError(
                f"{self._open} requests are running and waiting: try again later", status=429, code="queue_full"
            )

    async def _content(self, http: HttpRequest) -> bytes:
        most, parts, size = self._limits.body_bytes, [], 0
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                async for part in http.stream():
                    parts.append(part)
                    size += len(part)
                    if size > most:
                        raise RefusedError(f"body: expected at most {most} bytes", status=413, code="body_too_large")
        except TimeoutError as error:
            raise RefusedError("body: it did not arrive in time", status=408) from error
        return b"".join(parts)

    def _require_model(self, name: str) -> None:
        if name != self._name:
            raise RefusedError(
                f"model: expected {self._name}, got {name!r}", status=404, param="model", code="model_not_found"
            )

    def _answer(self, body: Body, ids: Sequence[int], reply: Reply) -> _Asgi:
        try:
            self._session.check(ids, mode=None, replay=None, chunk=None)
        except ContextError as error:
            raise RefusedError(str(error), param="prompt") from error
        request = Request(ids, replace(self._options(body, len(ids)), draft=self._draft), self._text)
        # others may have come while this one's body was read
        self._require_place()
        self._open += 1
        return _Asgi(
            Answer(
                self.worker,
                self.metrics,
                request,
                reply,
                stream=bool(body.stream),
                include_usage=body.include_usage,
                seconds=self._limits.seconds,
                send_seconds=self._limits.send_seconds,
                abort=self.abort,
                finished=self._finished,
            )
        )

    def _options(self, body: Body, prompt_tokens: int) -> Options:
        """How to generate: as many tokens as asked for, and no more than fit behind the prompt."""
        room = self._session.max_context - prompt_tokens + 1
        most = room if self._limits.max_tokens is None else min(room, self._limits.max_tokens)
        wanted = body.wanted_tokens
        if wanted is None:
            return body.options(most if body.usual_tokens is None else min(most, body.usual_tokens))
        if wanted > most:
            raise RefusedError(
                f"max_tokens: expected at most {most} behind {prompt_tokens} tokens of prompt, got {wanted}",
                param="max_tokens",
                code="context_length_exceeded",
            )
        return body.options(wanted)

    async def _refused(self, http: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, V41CError)
        # a model's name is the client's to choose, and every label stays in memory
        path = "/v1/models" if http.path_params else http.url.path
        self.metrics.requests.labels(path, str(status_of(error))).inc()
        return _json(error_json(error), status_of(error))

    def _finished(self) -> None:
        self._open -= 1


class _Asgi(Response):
    """An application in the place of a response."""

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand over."""
        await self._answer(scope, receive, send)


def _stopped() -> RefusedError:
    return RefusedError("the server is shutting down", status=503, code="shutting_down")


def _json(value: Json, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


async def _http_error(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    found = RefusedError(f"{http.method} {http.url.path}: {error.detail}", status=error.status_code)
    response = _json(error_json(found), error.status_code)
    response.headers.update(error.headers or {})
    return response


async def _nobody(http: HttpRequest, error: Exception) -> Response:
    """The client went away before its body was here."""
    return Response(status_code=400)
