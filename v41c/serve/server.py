"""The driver of `v41c serve`: an engine behind HTTP until the process is told to stop."""

from __future__ import annotations

import asyncio
import math
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import Scope

from v41c.errors import RefusedError, UsageError
from v41c.prefix_cache import PrefixCache
from v41c.run import open_session
from v41c.runtime.artifact import Engine, load
from v41c.runtime.drafter import check_drafts
from v41c.runtime.pool import Pool
from v41c.runtime.request import Options
from v41c.runtime.text import Text
from v41c.serve.app import Limits, Service
from v41c.serve.template import ChatTemplate

#: connections that are open at once: each may keep its client waiting in memory
_CONNECTIONS = 1024
#: seconds between the end of what runs and the end of the process, for answers to leave
_LEAVING_SECONDS = 5


@dataclass(frozen=True)
class ServeOptions:
    """Where to listen and what to take.

    port: 0 for a free one. slots: sequences at once, the engine's number when None. name: what clients call the model,
    the engine folder's name when None. grace_seconds: for what runs when the process is told to stop. cache: prefixes
    that prompts may begin with, none when None. draft: see `Options`.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    slots: int | None = None
    token_budget: int | None = None
    name: str | None = None
    grace_seconds: float = 30.0
    limits: Limits = field(default_factory=Limits)
    cache: PrefixCache | None = None
    draft: int | str = "off"

    def __post_init__(self) -> None:
        """UsageError for a time that is none."""
        if not 0 <= self.grace_seconds < math.inf:
            raise UsageError(f"grace: expected seconds, 0 or more, got {self.grace_seconds:g}")


class Server(uvicorn.Server):
    """uvicorn, which ends with exit code 0 when told to stop, and gives what runs some time to finish."""

    def __init__(self, service: Service, options: ServeOptions) -> None:
        config = uvicorn.Config(
            service.app,
            # the one that is always there: `_headless` looks into it
            http="h11",
            lifespan="off",
            ws="none",
            log_level="warning",
            access_log=False,
            server_header=False,
            limit_concurrency=_CONNECTIONS,
            timeout_graceful_shutdown=int(options.grace_seconds) + _LEAVING_SECONDS,
        )
        super().__init__(config)
        self._service, self._grace_seconds = service, options.grace_seconds
        self._head_seconds = options.limits.body_seconds
        self._headless: dict[Any, float] = {}
        service.abort = self._abort

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """SIGINT or SIGTERM: stop; told again, stop at once."""
        self.force_exit = self.should_exit
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Whether to stop: also when nobody runs the batch any more."""
        self.should_exit = self.should_exit or self._service.worker.failure is not None
        self._drop_headless()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no new requests, let those that run finish, and refuse what is left after the grace."""
        self._service.stop()
        timer = asyncio.get_running_loop().call_later(self._grace_seconds, self._service.refuse_all)
        await super().shutdown(sockets)
        timer.cancel()

    def _drop_headless(self) -> None:
        """Drop connections on which the head of a request takes too long: each is one of a limited number.

        No setting of uvicorn's does it: `timeout_keep_alive` begins to count behind a response, and nothing counts
        before the first request or within a head.
        """
        now, seen = time.monotonic(), self._headless
        waiting = [connection for connection in self.server_state.connections if _headless(connection)]
        self._headless = {connection: seen.get(connection, now) for connection in waiting}
        for connection, since in self._headless.items():
            if now - since > self._head_seconds:
                connection.transport.abort()

    def _abort(self, scope: Scope) -> None:
        """Drop a connection, whatever is still to be read from it."""
        for connection in list(self.server_state.connections):
            if getattr(connection, "client", None) == scope.get("client"):
                connection.transport.abort()


def _headless(connection: Any) -> bool:
    """Whether a connection of uvicorn's has no request, and no timer that ends it for want of one."""
    done = connection.cycle is None or connection.cycle.response_complete
    return done and connection.timeout_keep_alive_task is None


def serve(
    engine: str | Path, options: ServeOptions | None = None, ready: Callable[[str], None] = lambda url: None
) -> None:
    """Answer requests until SIGINT or SIGTERM; `ready` is told the address. In the main thread.

    Raises ArtifactError, TokenizerError, ContextError or UsageError before anything is answered, and RefusedError when
    the batch has failed, of which clients were told.
    """
    options = options or ServeOptions()
    loaded = load(engine)
    service = make_service(loaded, options)
    try:
        with listening(options) as listener:
            ready(address(listener))
            Server(service, options).run(sockets=[listener])
    finally:
        service.close()
    if service.worker.failure is not None:
        raise RefusedError(f"the batch has failed: {service.worker.failure}", status=500)


def make_service(engine: Engine, options: ServeOptions) -> Service:
    """A session of an engine, with its texts, behind an application."""
    text = Text(engine)
    template = None
    if engine.chat_template_path is not None:
        template = ChatTemplate(engine.chat_template_path, _names(engine, text))
    slots = engine.manifest.slots if options.slots is None else options.slots
    session = open_session(engine, Options(0, draft=options.draft), slots)
    check_drafts(session, options.draft)
    name = options.name or engine.path.resolve().name
    reuse = None if options.cache is None else options.cache.open(session, Pool())
    return Service(
        session,
        text,
        template,
        name,
        options.limits,
        token_budget=options.token_budget,
        reuse=reuse,
        draft=options.draft,
        created=int(time.time()),
    )


def listening(options: ServeOptions) -> socket.socket:
    """A socket that listens; UsageError for an address that cannot be had."""
    try:
        return socket.create_server(
            (options.host, options.port),
            family=socket.AF_INET6 if ":" in options.host else socket.AF_INET,
            backlog=_CONNECTIONS,
        )
    except (OSError, OverflowError) as error:
        place = f"[{options.host}]" if ":" in options.host else options.host
        raise UsageError(f"{place}:{options.port}: cannot listen there: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """Why, without the address, which `socket` puts behind the words of the system."""
    if isinstance(error, socket.gaierror) or not isinstance(error, OSError) or not error.errno:
        return getattr(error, "strerror", None) or str(error)
    return os.strerror(error.errno)


def address(listener: socket.socket) -> str:
    """Where clients find it."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _names(engine: Engine, text: Text) -> dict[str, str]:
    """The begin token and the first end token, as their texts."""
    manifest = engine.manifest
    found = {"bos_token": manifest.bos_token, "eos_token": next(iter(manifest.eos_tokens), None)}
    return {name: "" if token is None else text.spelled(token) for name, token in found.items()}
