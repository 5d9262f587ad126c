"""An answer: one request through the worker and back to its client, who may be slow or go away."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.types import Message, Receive, Scope, Send

from v41c.errors import RefusedError, V41CError
from v41c.runtime.request import Piece, Request
from v41c.serve.metrics import Metrics
from v41c.serve.replies import Json, Reply
from v41c.serve.worker import Update, Worker

#: what metrics call a request whose client went away, as nginx does
GONE = 499


class _GoneError(V41CError):
    """The client has gone or no longer reads."""


def error_json(error: V41CError) -> Json:
    """An error as the API spells it."""
    refused = error if isinstance(error, RefusedError) else None
    kind = "server_error" if status_of(error) >= 500 else "invalid_request_error"
    return {
        "error": {
            "message": str(error),
            "type": kind,
            "param": refused.param if refused else None,
            "code": refused.code if refused else None,
        }
    }


def status_of(error: V41CError) -> int:
    """HTTP's status for an error: what is no refusal is a fault of ours."""
    return error.status if isinstance(error, RefusedError) else 500


class Answer:
    """An ASGI application for one request. Memory for a client that does not read is what its tokens take."""

    def __init__(
        self,
        worker: Worker,
        metrics: Metrics,
        request: Request,
        reply: Reply,
        *,
        stream: bool,
        include_usage: bool,
        seconds: float,
        send_seconds: float,
        abort: Callable[[Scope], None],
        finished: Callable[[], None],
    ) -> None:
        """seconds: for all of it. send_seconds: for a client to read on; `abort` then drops its connection."""
        self._worker, self._metrics, self._request, self._reply = worker, metrics, request, reply
        self._is_stream, self._include_usage = stream, include_usage
        self._seconds, self._send_seconds, self._abort, self._finished = seconds, send_seconds, abort, finished
        self._updates: asyncio.Queue[Update] = asyncio.Queue()
        self._began = time.perf_counter()
        self._started = False
        self._has_token = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the request and answer it."""
        loop = asyncio.get_running_loop()

        def deliver(update: Update) -> None:
            with contextlib.suppress(RuntimeError):  # the loop may be closed by now
                loop.call_soon_threadsafe(self._updates.put_nowait, update)

        gone = asyncio.ensure_future(_until_gone(receive))
        self._worker.submit(self._request, deliver)
        status = GONE
        try:
            status = await self._answer(gone, scope, send)
        except (_GoneError, OSError):
            pass
        finally:
            gone.cancel()
            self._worker.cancel(self._request)
            self._finished()
            self._count(scope, status)

    async def _answer(self, gone: asyncio.Future[None], scope: Scope, send: Send) -> int:
        out = _Out(send, self._send_seconds, lambda: self._abort(scope))
        try:
            async with asyncio.timeout(self._seconds):
                if self._is_stream:
                    await self._streamed(gone, out)
                else:
                    await self._whole(gone, out)
        except TimeoutError:
            await self._fail(out, RefusedError(f"not done within {self._seconds:g} s", status=504, code="timeout"))
            return 504
        except _GoneError:
            raise
        except V41CError as error:
            await self._fail(out, error)
            return status_of(error)
        return 200

    async def _whole(self, gone: asyncio.Future[None], out: _Out) -> None:
        pieces: list[Piece] = []
        while not (update := await self._next(gone)).done:
            pieces += update.pieces
        await out.json(200, self._reply.whole([*pieces, *update.pieces], self._request.result))

    async def _streamed(self, gone: asyncio.Future[None], out: _Out) -> None:
        """Server-sent events. Nothing is sent before the first token: until then a failure has a status of its own."""
        update = await self._next(gone)
        await out.begin_stream()
        self._started = True
        for first in self._reply.begin():
            await out.event(first)
        while True:
            if update.pieces:
                await out.event(self._reply.chunk(update.pieces))
            if update.done:
                break
            update = await self._next(gone)
        await out.event(self._reply.end(self._request.result))
        if self._include_usage:
            await out.event(self._reply.count(self._request.result))
        await out.end_stream()

    async def _fail(self, out: _Out, error: V41CError) -> None:
        if self._started:
            await out.event(error_json(error))
            await out.end_stream(done=False)
        else:
            await out.json(status_of(error), error_json(error))

    async def _next(self, gone: asyncio.Future[None]) -> Update:
        """Everything that has come meanwhile, at least one update; raises what failed, or that the client is gone."""
        if self._updates.empty():
            coming = asyncio.ensure_future(self._updates.get())
            try:
                first: set[asyncio.Future[Any]] = {coming, gone}
                await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            finally:
                if not coming.done():
                    coming.cancel()
            if not coming.done() or coming.cancelled():
                raise _GoneError("the client has gone")
            updates = [coming.result()]
        else:
            updates = []
        while not self._updates.empty():
            updates.append(self._updates.get_nowait())
        for update in updates:
            if update.error is not None:
                raise update.error
        pieces = [piece for update in updates for piece in update.pieces]
        if not self._has_token and pieces:
            self._has_token = True
            self._metrics.first_token.observe(time.perf_counter() - self._began)
        return Update(pieces, updates[-1].done)

    def _count(self, scope: Scope, status: int) -> None:
        metrics, result = self._metrics, self._request.result
        metrics.requests.labels(scope["path"], str(status)).inc()
        metrics.prompt_tokens.inc(result.prompt_tokens)
        metrics.generated_tokens.inc(len(result.tokens))
        if status == 200:
            metrics.seconds.observe(time.perf_counter() - self._began)


class _Out:
    """Messages to a client who must read on within some seconds."""

    def __init__(self, send: Send, seconds: float, abort: Callable[[], None]) -> None:
        self._send, self._seconds, self._abort = send, seconds, abort

    async def json(self, status: int, value: Json) -> None:
        """A whole answer."""
        body = msgspec.json.encode(value)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await self._put({"type": "http.response.start", "status": status, "headers": headers})
        await self._put({"type": "http.response.body", "body": body})

    async def begin_stream(self) -> None:
        """The head of a stream of events."""
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await self._put({"type": "http.response.start", "status": 200, "headers": headers})

    async def event(self, value: Json) -> None:
        """An event."""
        body = b"data: " + msgspec.json.encode(value) + b"\n\n"
        await self._put({"type": "http.response.body", "body": body, "more_body": True})

    async def end_stream(self, *, done: bool = True) -> None:
        """The end; `done` unless something failed."""
        await self._put({"type": "http.response.body", "body": b"data: [DONE]\n\n" if done else b""})

    async def _put(self, message: Message) -> None:
        try:
            async with asyncio.timeout(self._seconds):
                await self._send(message)
        except TimeoutError as error:
            self._abort()
            raise _GoneError(f"the client has not read for {self._seconds:g} s") from error


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
