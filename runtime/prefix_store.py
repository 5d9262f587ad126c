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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from v41c.errors import UsageError
from v41c.manifest import Manifest, encode
from v41c.runtime.prefix_entry import Entry, Format, Ints, head_bytes, parent_of, remove_unfinished, write
from v41c.runtime.states import Array, row_kinds

#: takes rows of a state, by name, from a row on
Put = Callable[[str, int, Array], None]
#: gives rows begin … end − 1 of a state, by name
Read = Callable[[str, int, int], Array]

#: tokens of an entry, cut down to a multiple of the engine's ratios
BLOCK_TOKENS = 64
DEFAULT_LIMIT_BYTES = 4 << 30
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
        self._known: dict[str, Entry | None] = {}
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
        children = self._children()
        entries: list[Entry] = []
        parent, length = self._format.engine, 0
        while length < usable:
            wanted = tokens[length : min(length + self._block, usable)]
            entry, used = self._longest(children.get(parent, ()), Entry(parent, wanted))
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
        children = self._children()
        chain: list[Entry] = []
        missing: list[tuple[int, Entry]] = []
        parent = self._format.engine
        for begin in range(0, aligned, self._block):
            wanted = Entry(parent, tokens[begin : min(begin + self._block, aligned)])
            siblings = children.get(parent, ())
            held, used = self._longest(siblings, wanted)
            if held is None or used < len(wanted.tokens):
                missing.append((begin, wanted))
                self._remove_parts(siblings, wanted)
                held = wanted
            chain.append(held)
            parent = wanted.digest
        fitting = self._make_room([entry for _, entry in missing], {entry.name for entry in chain})
        for begin, entry in missing[:fitting]:
            if not self._write(entry, begin, read):
                break
        self._touch(chain)

    def _children(self) -> dict[bytes, list[str]]:
        """Names of entries by their parent."""
        children: dict[bytes, list[str]] = {}
        for file in self._files():
            parent = parent_of(file.name)
            if parent is not None:
                children.setdefault(parent, []).append(file.name)
        known = self._known
        self._known = {name: known[name] for names in children.values() for name in names if name in known}
        return children

    def _files(self) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(self.folder) as found:
                return sorted(found, key=lambda file: file.name)
        except OSError as error:
            self._cannot_keep(error)
            return []

    def _longest(self, names: Sequence[str], wanted: Entry) -> tuple[Entry | None, int]:
        """Of entries with the same parent, the one that holds the most of the wanted tokens, and how many it holds."""
        if wanted.name in names:
            return wanted, len(wanted.tokens)
        best: tuple[Entry | None, int] = (None, 0)
        for entry in map(self._entry, names):
            shared = self.aligned(_shared(entry.tokens, wanted.tokens)) if entry else 0
            if shared > best[1]:
                best = entry, shared
        return best

    def _remove_parts(self, names: Iterable[str], whole: Entry) -> None:
        """Remove entries all of whose tokens are in the one that is about to be written."""
        for name in names:
            entry = self._entry(name)
            if entry and len(entry.tokens) == _shared(entry.tokens, whole.tokens):
                self._remove(name)

    def _entry(self, name: str) -> Entry | None:
        """The entry in a file, by its head alone; None, and the file is gone, when it has none."""
        if name not in self._known:
            try:
                with (self.folder / name).open("rb") as file:
                    head = file.read(head_bytes(self._block))
            except OSError:
                return None
            self._known[name] = self._format.head(name, head)
            if self._known[name] is None:
                self._refuse(name, "not what its name says")
        return self._known[name]

    def _content(self, entry: Entry) -> bytes | None:
        """The file of an entry; None unless every byte is what was written."""
        try:
            content = (self.folder / entry.name).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            _log.warning("%s: cannot be read: %s: computed anew", self.folder / entry.name, error.strerror)
            return None
        fault = self._format.fault(entry, content)
        if fault is not None:
            self._refuse(entry.name, fault)
            return None
        return content

    def _write(self, entry: Entry, begin: int, read: Read) -> bool:
        end = begin + len(entry.tokens)
        rows = [read(kind.name, begin // kind.ratio, end // kind.ratio) for kind in self.kinds]
        try:
            write(self.folder / entry.name, self._format.encode(entry, rows))
        except OSError as error:
            self._cannot_keep(error)
            return False
        return True

    def _make_room(self, entries: Sequence[Entry], spared: set[str]) -> int:
        """Remove what was used longest ago until new entries fit; how many of them, from the first on, do."""
        sizes = [self._format.size_bytes(len(entry.tokens)) for entry in entries]
        found: list[tuple[int, str, int]] = []
        for file in (file for file in self._files() if parent_of(file.name) is not None):
            with contextlib.suppress(OSError):
                found.append((file.stat().st_mtime_ns, file.name, file.stat().st_size))
        used_bytes = sum(size for _, _, size in found) + sum(sizes)
        for _, name, size in sorted(found):
            if used_bytes <= self._limit_bytes:
                break
            if name not in spared:
                self._remove(name)
                used_bytes -= size
        while sizes and used_bytes > self._limit_bytes:
            used_bytes -= sizes.pop()
        return len(sizes)

    def _touch(self, chain: Sequence[Entry]) -> None:
        """Mark entries as used now, parents after their children."""
        now = time.time_ns()
        for later, entry in enumerate(reversed(chain)):
            with contextlib.suppress(OSError):
                os.utime(self.folder / entry.name, ns=(now + later, now + later))

    def _refuse(self, name: str, fault: str) -> None:
        _log.warning("%s: %s: removed, computed anew", self.folder / name, fault)
        self._remove(name)

    def _remove(self, name: str) -> None:
        with contextlib.suppress(OSError):
            (self.folder / name).unlink()

    def _cannot_keep(self, error: OSError) -> None:
        if not self._warned:
            _log.warning("%s: prefixes cannot be kept: %s", self.folder, error.strerror)
        self._warned = True


def _shared(a: Ints, b: Ints) -> int:
    """Tokens that both begin with."""
    length = min(len(a), len(b))
    differing = np.flatnonzero(a[:length] != b[:length])
    return int(differing[0]) if len(differing) else length
