"""What a server tells Prometheus about itself."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """Counters of one server."""

    def __init__(self, running: Callable[[], float], waiting: Callable[[], float]) -> None:
        """Gauges ask for the requests that run and wait now."""
        self._registry = CollectorRegistry()
        registry = self._registry
        self.requests = Counter(
            "v41c_requests", "Requests by path and HTTP status; 499: the client went away.", ["path", "status"],
            registry=registry,
        )  # fmt: skip
        self.prompt_tokens = Counter("v41c_prompt_tokens", "Tokens of prompts.", registry=registry)
        self.generated_tokens = Counter("v41c_generated_tokens", "Generated tokens.", registry=registry)
        self.first_token = Histogram(
            "v41c_first_token_seconds", "From the request to its first token.", buckets=_SECONDS, registry=registry
        )
        self.seconds = Histogram(
            "v41c_request_seconds", "From the request to its last token.", buckets=_SECONDS, registry=registry
        )
        Gauge("v41c_running", "Requests in the steps of the batch.", registry=registry).set_function(running)
        Gauge("v41c_waiting", "Requests that wait for a slot.", registry=registry).set_function(waiting)

    def text(self) -> bytes:
        """All of them in Prometheus' format."""
        return generate_latest(self._registry)
