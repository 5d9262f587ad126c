"""A file of the prefix store: the global rows of some tokens, complete and unchanged or refused.

Little-endian:

    magic 8 B | SHA-256 of what follows | engine's digest 32 B | parent's digest 32 B | T u32 | token ids i32 [T] | rows

with the rows of each global state one after the other, T / ratio of them, in the manifest's order. An entry's digest is
SHA-256(parent, token ids), its name `<parent>-<digest>.prefix`; the parent of a first entry is the engine's digest.
Files lie in folders by the first two digits of their names, which those with one parent share.

A file is written under another name and renamed, so that a reader needs no lock. Its writer holds a lock on it, which
falls when the writer dies, however it dies: an unfinished file without one is a left-over. Damage by a crash of the
whole machine shows in the SHA-256, so nothing waits for the disk.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import math
import os
import re
import struct
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from v41c.runtime.states import Array, RowKind

Ints = npt.NDArray[np.int32]

_MAGIC = b"v41cpre1"
_HEADER = struct.Struct("<8s32s32s32sI")
_SEALED = len(_MAGIC) + hashlib.sha256().digest_size
_NAME = re.compile("([0-9a-f]{64})-([0-9a-f]{64})[.]prefix")
_UNFINISHED = "unfinished-"
_UNFINISHED_NAME = re.compile(_UNFINISHED + "[0-9a-f]{32}")


@dataclass(frozen=True, eq=False)
class Entry:
    """An entry's parent, by digest, and its token ids i32 [T]."""

    parent: bytes
    tokens: Ints

    @property
    def digest(self) -> bytes:
        """What the entries that follow it call it."""
        return hashlib.sha256(self.parent + self.tokens.astype("<i4").tobytes()).digest()

    @property
    def name(self) -> str:
        """The name of its file."""
        return f"{self.parent.hex()}-{self.digest.hex()}.prefix"

    @property
    def place(self) -> str:
        """Its file within the store's folder."""
        return f"{place_of_children(self.parent)}/{self.name}"


@dataclass(frozen=True)
class Format:
    """What entries of one engine look like: its digest, and its global states."""

    engine: bytes
    kinds: Sequence[RowKind]

    def size_bytes(self, tokens: int) -> int:
        """Bytes of an entry of that many tokens."""
        return _HEADER.size + 4 * tokens + sum(tokens // kind.ratio * kind.row_bytes for kind in self.kinds)

    def encode(self, entry: Entry, rows: Sequence[Array]) -> bytes:
        """The content of an entry's file, from rows by state."""
        body = b"".join([self._head(entry), *(array.tobytes() for array in rows)])
        return _MAGIC + hashlib.sha256(body).digest() + body

    def head(self, name: str, content: bytes) -> Entry | None:
        """The entry whose file of that name begins so, None when it is none of this engine's."""
        if len(content) < _HEADER.size:
            return None
        magic, _, engine, parent, count = _HEADER.unpack_from(content)
        if magic != _MAGIC or engine != self.engine or len(content) < _HEADER.size + 4 * count:
            return None
        entry = Entry(parent, np.frombuffer(content, "<i4", count, _HEADER.size))
        return entry if entry.name == name else None

    def fault(self, entry: Entry, content: bytes) -> str | None:
        """What keeps a file from being the entry, in a phrase; None when every byte is as it was written."""
        expected = self.size_bytes(len(entry.tokens))
        if len(content) != expected:
            return f"expected {expected} bytes, found {len(content)}"
        if content[len(_MAGIC) : _SEALED] != hashlib.sha256(memoryview(content)[_SEALED:]).digest():
            return "damaged: its SHA-256 differs"
        head = self._head(entry)
        if content[: len(_MAGIC)] != _MAGIC or content[_SEALED : _SEALED + len(head)] != head:
            return "not what its name says"
        return None

    def rows(self, entry: Entry, content: bytes) -> Iterator[Array]:
        """Rows by state, from a file without fault."""
        offset = _HEADER.size + 4 * len(entry.tokens)
        for kind in self.kinds:
            rows = len(entry.tokens) // kind.ratio
            array = np.frombuffer(content, kind.dtype, rows * math.prod(kind.shape), offset)
            yield array.reshape(rows, *kind.shape)
            offset += array.nbytes

    def _head(self, entry: Entry) -> bytes:
        """What follows the seal, up to the rows."""
        count = struct.pack("<I", len(entry.tokens))
        return self.engine + entry.parent + count + entry.tokens.astype("<i4").tobytes()


def head_bytes(tokens: int) -> int:
    """Bytes before the rows in an entry of that many tokens."""
    return _HEADER.size + 4 * tokens


def place_of_children(parent: bytes) -> str:
    """The folder, within the store's, of all entries with that parent."""
    return parent.hex()[:2]


def children(folder: Path, parent: bytes) -> list[str]:
    """Names of the entries with that parent; OSError when there is no telling."""
    try:
        names = os.listdir(folder / place_of_children(parent))
    except FileNotFoundError:
        return []
    return sorted(name for name in names if _NAME.fullmatch(name) and name.startswith(parent.hex()))


def files(folder: Path) -> Iterator[Path]:
    """Every entry's file in a store's folder; OSError when there is no telling."""
    for place in folder.iterdir():
        if re.fullmatch("[0-9a-f]{2}", place.name) and place.is_dir():
            names = os.listdir(place)
            yield from (place / name for name in names if _NAME.fullmatch(name) and name.startswith(place.name))


def write(folder: Path, place: str, content: bytes) -> None:
    """Write a file of a store's folder whole or not at all; OSError when it cannot be."""
    unfinished = folder / f"{_UNFINISHED}{uuid.uuid4().hex}"
    try:
        with unfinished.open("xb") as file:
            with contextlib.suppress(OSError):  # where there are no locks, nothing is taken for a left-over either
                fcntl.flock(file, fcntl.LOCK_EX)
            file.write(content)
            file.flush()
            (folder / place).parent.mkdir(exist_ok=True)
            unfinished.replace(folder / place)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def remove_unfinished(folder: Path) -> None:
    """Remove files whose writer has died; OSError when the folder cannot be read."""
    for name in os.listdir(folder):
        if not _UNFINISHED_NAME.fullmatch(name):
            continue
        with contextlib.suppress(OSError), (folder / name).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (folder / name).unlink()
