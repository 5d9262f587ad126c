"""Global rows of token prefixes, kept in a folder: across processes and restarts, within a size.

A prefix lies in a chain of entries (`prefix_entry`) of `BLOCK_TOKENS` tokens each, the last one shorter. So prefixes
share what they have in common, a growing conversation only adds to it, and no engine sees another's entries. A chain is
as good as its first entries: whoever uses one marks parents after their children, and what was used longest ago goes
first.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from v41c.errors import UsageError
from v41c.manifest import Manifest, encode
from v41c.runtime.prefix_entry import (
    Entry,
    Format,
    Ints,
    children,
    files,
    head_bytes,
    place_of_children,
    remove_unfinished,
    write,
)
from v41c.runtime.states import Array, row_kinds

#: takes rows of a state, by name, from a row on
Put = Callable[[str, int, Array], None]
#: gives rows begin … end − 1 of a state, by name
Read = Callable[[str, int, int], Array]

#: tokens of an entry, cut down to a multiple of the engine's ratios
BLOCK_TOKENS = 64
DEFAULT_LIMIT_BYTES = 4 << 30
#: of the limit, what a process adds before it looks what others have added
_UNSEEN_SHARE = 1 / 64
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prefix:
    """The first `length` tokens of a prompt, as the entries that hold their rows; the last may hold more."""

    length: int
    entries: tuple[Entry, ...]


class PrefixStore:
    """The prefixes of one engine in a folder, which other engines and processes may use at the same time.

    Nothing that happens to the folder ends a run: what cannot be read is computed anew, what cannot be written is not
    kept, and a warning says so.
    """

    def __init__(self, folder: str | Path, manifest: Manifest, *, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> None:
        """Make the folder if there is none; `limit_bytes` for all entries in it. UsageError for a path of a file."""
        if limit_bytes < 0:
            raise UsageError(f"prefix-cache-bytes: expected 0 or more, got {limit_bytes}")
        self.folder = Path(folder)
        self.kinds = row_kinds(manifest)
        self._format = Format(hashlib.sha256(encode(manifest)).digest(), self.kinds)
        self._alignment = math.lcm(*(kind.ratio for kind in self.kinds))
        self._block = max(1, BLOCK_TOKENS // self._alignment) * self._alignment
        self._limit_bytes = limit_bytes
        self._known: dict[str, Entry] = {}
        # all entries, as far as this process knows, and what it has added since it looked
        self._used_bytes, self._unseen_bytes = 0, math.inf
        self._warned = False
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            remove_unfinished(self.folder)
        except (FileExistsError, NotADirectoryError) as error:
            raise UsageError(f"prefix-cache: {self.folder}: expected a folder, found a file") from error
        except OSError as error:
            self._cannot_keep(error)

    def aligned(self, tokens: int) -> int:
        """How many of a sequence's first tokens leave no group open, of any ratio."""
        return tokens // self._alignment * self._alignment

    def find(self, tokens: Ints) -> Prefix:
        """The longest prefix of the tokens i32 [N] that is kept: a multiple of the ratios, and at least one is left."""
        usable = self.aligned(len(tokens) - 1)
        entries: list[Entry] = []
        parent, length = self._format.engine, 0
        while length < usable:
            entry, used = self._longest(Entry(parent, tokens[length : min(length + self._block, usable)]))
            if entry is None:
                break
            entries.append(entry)
            length += used
            if used < self._block:
                break
            parent = entry.digest
        return Prefix(length, tuple(entries))

    def load(self, prefix: Prefix, put: Put) -> int:
        """Hand out the rows of a prefix; how many tokens they are of: fewer if an entry is gone or damaged by now."""
        begin = 0
        for entry in prefix.entries[: -(-prefix.length // self._block)]:
            content = self._content(entry)
            if content is None:
                break
            end = min(begin + self._block, prefix.length)
            for kind, rows in zip(self.kinds, self._format.rows(entry, content), strict=True):
                put(kind.name, begin // kind.ratio, rows[: (end - begin) // kind.ratio])
            begin = end
        self._touch(prefix.entries)
        return begin

    def save(self, tokens: Ints, read: Read) -> None:
        """Keep the global rows of a sequence's tokens i32 [N], all of them fed, as far as no group is open."""
        aligned = self.aligned(len(tokens))
        chain: list[Entry] = []
        missing: list[tuple[int, Entry]] = []
        parent = self._format.engine
        for begin in range(0, aligned, self._block):
            wanted = Entry(parent, tokens[begin : min(begin + self._block, aligned)])
            held, used = self._longest(wanted)
            if held is None or used < len(wanted.tokens):
                missing.append((begin, wanted))
                self._remove_parts(wanted)
                held = wanted
            chain.append(held)
            parent = wanted.digest
        fitting = self._make_room([entry for _, entry in missing], {entry.name for entry in chain})
        for begin, entry in missing[:fitting]:
            if not self._write(entry, begin, read):
                break
        self._touch(chain)

    def _longest(self, wanted: Entry) -> tuple[Entry | None, int]:
        """Of entries with the same parent, the one that holds the most of the wanted tokens, and how many it holds."""
        if os.path.exists(self.folder / wanted.place):
            return wanted, len(wanted.tokens)
        best: tuple[Entry | None, int] = (None, 0)
        for entry in self._children(wanted.parent):
            shared = self.aligned(_shared(entry.tokens, wanted.tokens))
            if shared > best[1]:
                best = entry, shared
        return best

    def _remove_parts(self, whole: Entry) -> None:
        """Remove entries all of whose tokens are in the one that is about to be written."""
        for entry in self._children(whole.parent):
            if len(entry.tokens) == _shared(entry.tokens, whole.tokens):
                self._remove(entry.place)

    def _children(self, parent: bytes) -> list[Entry]:
        """Entries with that parent."""
        try:
            names = children(self.folder, parent)
        except OSError as error:
            self._cannot_keep(error)
            return []
        found = (self._entry(f"{place_of_children(parent)}/{name}") for name in names)
        return [entry for entry in found if entry is not None]

    def _entry(self, place: str) -> Entry | None:
        """The entry in a file, by its head alone; None, and the file is gone, when it has none."""
        if place not in self._known:
            path = self.folder / place
            try:
                with path.open("rb") as file:
                    head = file.read(head_bytes(self._block))
            except OSError:
                return None
            entry = self._format.head(path.name, head)
            if entry is None:
                self._refuse(place, "not what its name says")
                return None
            self._known[place] = entry
        return self._known[place]

    def _content(self, entry: Entry) -> bytes | None:
        """The file of an entry; None unless every byte is what was written."""
        try:
            content = (self.folder / entry.place).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            _log.warning("%s: cannot be read: %s: computed anew", self.folder / entry.place, error.strerror)
            return None
        fault = self._format.fault(entry, content)
        if fault is not None:
            self._refuse(entry.place, fault)
            return None
        return content

    def _write(self, entry: Entry, begin: int, read: Read) -> bool:
        end = begin + len(entry.tokens)
        rows = [read(kind.name, begin // kind.ratio, end // kind.ratio) for kind in self.kinds]
        content = self._format.encode(entry, rows)
        try:
            write(self.folder, entry.place, content)
        except OSError as error:
            self._cannot_keep(error)
            return False
        self._used_bytes += len(content)
        self._unseen_bytes += len(content)
        return True

    def _make_room(self, entries: Sequence[Entry], spared: set[str]) -> int:
        """Remove what was used longest ago until new entries fit; how many of them, from the first on, do.

        What all processes keep is added up anew where it matters, and whenever this one has written a share of it.
        """
        sizes = [self._format.size_bytes(len(entry.tokens)) for entry in entries]
        most = self._limit_bytes - sum(sizes)
        if self._used_bytes > most or self._unseen_bytes > self._limit_bytes * _UNSEEN_SHARE:
            self._survey(most, spared)
        while sizes and self._used_bytes + sum(sizes) > self._limit_bytes:
            sizes.pop()
        return len(sizes)

    def _survey(self, most_bytes: int, spared: set[str]) -> None:
        """Add up the sizes of all entries, and remove those used longest ago while they are more than they may."""
        found: list[tuple[int, Path, int]] = []
        try:
            for path in files(self.folder):
                with contextlib.suppress(FileNotFoundError):
                    status = path.stat()
                    found.append((status.st_mtime_ns, path, status.st_size))
        except OSError as error:
            self._cannot_keep(error)
        self._used_bytes, self._unseen_bytes = sum(size for _, _, size in found), 0
        self._known.clear()
        for _, path, size in sorted(found):
            if self._used_bytes <= most_bytes:
                break
            if path.name not in spared:
                self._remove(f"{path.parent.name}/{path.name}")
                self._used_bytes -= size

    def _touch(self, chain: Sequence[Entry]) -> None:
        """Mark entries as used now, parents after their children."""
        now = time.time_ns()
        for later, entry in enumerate(reversed(chain)):
            with contextlib.suppress(OSError):
                os.utime(self.folder / entry.place, ns=(now + later, now + later))

    def _refuse(self, place: str, fault: str) -> None:
        _log.warning("%s: %s: removed, computed anew", self.folder / place, fault)
        self._remove(place)

    def _remove(self, place: str) -> None:
        with contextlib.suppress(OSError):
            (self.folder / place).unlink()

    def _cannot_keep(self, error: OSError) -> None:
        if not self._warned:
            _log.warning("%s: prefixes cannot be kept: %s", self.folder, error.strerror)
        self._warned = True


def _shared(a: Ints, b: Ints) -> int:
    """Tokens that both begin with."""
    length = min(len(a), len(b))
    differing = np.flatnonzero(a[:length] != b[:length])
    return int(differing[0]) if len(differing) else length
