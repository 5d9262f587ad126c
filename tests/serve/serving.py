"""A server in a thread of this process, for tests."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from openai import OpenAI

from v41c.runtime.artifact import Engine
from v41c.serve.app import Service
from v41c.serve.server import ServeOptions, Server, address, listening, make_service


@dataclass(frozen=True)
class Running:
    """A server that answers."""

    service: Service
    server: Server
    url: str

    @property
    def place(self) -> tuple[str, int]:
        """Host and port."""
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return host, int(port)

    def client(self) -> OpenAI:
        """The official client; nothing is tried twice."""
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)


@contextmanager
def running(engine: Engine, options: ServeOptions) -> Iterator[Running]:
    """A server at a free port; it has ended in order when the context does."""
    service = make_service(engine, options)
    server = Server(service, options)
    with listening(options) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield Running(service, server, address(listener))
        finally:
            server.should_exit = True
            thread.join(60)
            service.close()
    assert not thread.is_alive()
    assert service.worker.failure is None
