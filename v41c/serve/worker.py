"""The thread that runs the batch: requests go in from anywhere, what comes of them goes out by call-backs."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from v41c.errors import RefusedError, V41CError
from v41c.runtime.batch import Batch
from v41c.runtime.request import Piece, Request
from v41c.runtime.reuse import Reuse
from v41c.runtime.session import Session


@dataclass(frozen=True, eq=False)
class Update:
    """What a step did for a request: pieces, whether it is over, and why it failed, if it did."""

    pieces: list[Piece]
    done: bool = False
    error: V41CError | None = None


#: called in the worker's thread
Deliver = Callable[[Update], None]


class Worker:
    """Runs a batch of a session until it is closed. Every method may be called from any thread."""

    def __init__(self, session: Session, *, token_budget: int | None = None, reuse: Reuse | None = None) -> None:
        """Begin to wait for requests. token_budget, reuse: see `Batch`."""
        self._batch = Batch(session, token_budget=token_budget, reuse=reuse)
        self._delivers: dict[Request, Deliver] = {}
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="v41c-batch", daemon=True)
        self._thread.start()

    @property
    def running(self) -> int:
        """Requests in the batch's steps."""
        return self._batch.running

    @property
    def waiting(self) -> int:
        """Requests without a slot."""
        return self._batch.waiting

    def submit(self, request: Request, deliver: Deliver) -> None:
        """Let a request join; `deliver` hears of it until an update that is the last."""
        self._tell(lambda: self._add(request, deliver))

    def cancel(self, request: Request) -> None:
        """Let a request leave, if it is still there; nothing more is delivered."""
        self._tell(lambda: self._remove(request))

    def refuse_all(self, error: RefusedError) -> None:
        """End every request with an error."""
        self._tell(lambda: self._end_all(error))

    def close(self) -> None:
        """Drop what is left and wait for the thread's end."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    def _tell(self, command: Callable[[], None]) -> None:
        with self._wake:
            self._inbox.append(command)
            self._wake.notify()

    def _run(self) -> None:
        try:
            while self._obey():
                for event in self._batch.step():
                    request = event.request
                    if event.pieces or request.done:
                        self._deliver(request, Update(event.pieces, request.done, request.error))
        except BaseException as error:
            # whatever it is, those who wait must hear of it: nobody will run their requests
            self.failure = error
            running = True
            while running:
                self._end_all(RefusedError(f"the batch has failed: {error}", status=500))
                running = self._obey()

    def _obey(self) -> bool:
        """Do what was asked for meanwhile, waiting where there is nothing else to do; False to stop."""
        with self._wake:
            while (self.failure is not None or self._batch.idle) and not self._inbox and not self._closing:
                self._wake.wait()
            commands, self._inbox = self._inbox, deque()
        for command in commands:
            command()
        return not self._closing

    def _add(self, request: Request, deliver: Deliver) -> None:
        self._delivers[request] = deliver
        if self.failure is not None:
            return
        try:
            self._batch.add(request)
        except V41CError as error:
            self._deliver(request, Update([], True, error))

    def _remove(self, request: Request) -> None:
        if self._delivers.pop(request, None) is not None:
            self._batch.cancel(request)

    def _end_all(self, error: RefusedError) -> None:
        for request in list(self._delivers):
            self._batch.cancel(request)
            self._deliver(request, Update([], True, error))

    def _deliver(self, request: Request, update: Update) -> None:
        deliver = self._delivers.get(request)
        if update.done:
            self._delivers.pop(request, None)
        if deliver is not None:
            deliver(update)
