"""What a verification may overwrite: rows of a sequence's states, remembered so that they can be put back.

`StateEntry` says where rows are. A row of every `ratio` tokens belongs to the token that closes its group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from v41c.errors import ContextError
from v41c.manifest import Manifest
from v41c.runtime.bounds import bind, extent_bytes
from v41c.runtime.states import row_kinds


@dataclass(frozen=True)
class Rows:
    """Rows of one state: `length` of a slot, of `row_bytes` each; row n for tokens n · ratio … (n + 1) · ratio − 1.

    n counts on where a ring begins again. `offset`: bytes into a slot's part of the journal, where its copies are.
    """

    name: str
    length: int
    row_bytes: int
    ratio: int
    offset: int

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot."""
        return self.length * self.row_bytes

    def pieces(self, span: range, begin: int) -> Iterator[tuple[int, int, int]]:
        """Bytes that lie together of the rows that tokens at positions of `span` from `begin` on write.

        Where they are in the slot's state, where in the slot's part of the journal, and how many.
        """
        first, row, end = span.start // self.ratio, begin // self.ratio, span.stop // self.ratio
        while row < end:
            place = row % self.length
            count = min(self.length - place, end - row)
            yield place * self.row_bytes, self.offset + (row - first) * self.row_bytes, count * self.row_bytes
            row += count


class Journal:
    """Where copies of rows are kept, and for which positions of each slot.

    rows: of every state, in the manifest's order. slot_bytes: what a slot takes in the journal.
    """

    def __init__(self, manifest: Manifest, dims: Mapping[str, int], most_tokens: int) -> None:
        """Room for the rows that `most_tokens` consecutive tokens of each slot write."""
        ratios = {kind.name: kind.ratio for kind in row_kinds(manifest)}
        self.rows: list[Rows] = []
        self.slot_bytes = 0
        for state in manifest.states:
            slots, length = bind(state.shape[:2], dims)
            ratio = ratios.get(state.name, 1)
            row_bytes = extent_bytes(state, dims) // (slots * length)
            self.rows.append(Rows(state.name, length, row_bytes, ratio, self.slot_bytes))
            self.slot_bytes += -(-most_tokens // ratio) * row_bytes
        self.size_bytes = dims["S"] * self.slot_bytes
        self._most_tokens = most_tokens
        self._spans: dict[int, range] = {}

    def begin(self, slot: int, begin: int, end: int) -> range:
        """The positions that are remembered of a slot from now on; ContextError when there is no room for so many."""
        if not 0 <= begin <= end <= begin + self._most_tokens:
            raise ContextError(f"save: expected at most {self._most_tokens} positions, got {begin} to {end}")
        self._spans[slot] = range(begin, end)
        return self._spans[slot]

    def span(self, slot: int, begin: int) -> range:
        """The positions that are remembered of a slot; ContextError when those from `begin` on are not."""
        span = self._spans.get(slot, range(0))
        if not span.start <= begin <= span.stop:
            raise ContextError(
                f"restore: slot {slot}: expected a position within {span.start} to {span.stop}, got {begin}"
            )
        return span
