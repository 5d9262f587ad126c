"""Generation: a prompt in, tokens and text out, one at a time, until something says stop."""

from __future__ import annotations

from collections.abc import Iterator

from v41c.runtime.batch import Batch
from v41c.runtime.request import Options, Piece, Request, Result
from v41c.runtime.reuse import Reuse
from v41c.runtime.session import Session, Tokens
from v41c.runtime.text import Text


class Generation:
    """A batch of one request. Iterate once to generate; `result` fills up meanwhile.

    The sequence stays in its slot and can be continued, by the last generated token first: it has not been fed.
    """

    def __init__(
        self,
        session: Session,
        prompt: Tokens,
        options: Options,
        text: Text | None = None,
        *,
        slot: int = 0,
        reuse: Reuse | None = None,
    ) -> None:
        """Nothing runs yet. Without `text` the pieces have tokens only. reuse: see `Batch`."""
        self._session = session
        self._reuse = reuse
        self._request = Request(prompt, options, text)
        self._slot = slot
        self._pieces = self._run()

    @property
    def result(self) -> Result:
        """What has come of it so far."""
        return self._request.result

    def __iter__(self) -> Iterator[Piece]:
        """Pieces until the end token, `max_new_tokens`, or a context without room for the last token's step."""
        return self._pieces

    def _run(self) -> Iterator[Piece]:
        batch = Batch(self._session, reuse=self._reuse)
        batch.add(self._request, slot=self._slot)
        while not batch.idle:
            for event in batch.step():
                yield from event.pieces
        if self._request.error is not None:
            raise self._request.error
