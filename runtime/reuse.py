"""Reuse of prefixes: a sequence begins with what earlier ones left, and leaves what later ones may begin with.

Of the first P tokens of a prompt the store has the global rows. The local state of the last min(P, W) of them is made
anew by a replay (DeepSeek-V4.1 report, section 2.1): they are fed again, their window cut at the first of them, and
write no global rows. If the pool has the local state as well, nothing is replayed. What is left of the prompt is fed as
usual. Block-token evaluations: L_encoder·(min(P, W) + N − P) + L_decoder·min(N, W).

Images are told apart by what is seen in them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from v41c.errors import ArtifactError
from v41c.runtime.pool import Local, Pool
from v41c.runtime.prefix_store import Prefix, PrefixStore
from v41c.runtime.session import Session, Standing, Tokens
from v41c.runtime.states import Array, row_kinds
from v41c.runtime.steps import Cuts, Ints
from v41c.runtime.vision import content_keys

_HISTORY = "engram.history"
_COMPRESSED_IDS = "engram.compressed_ids"


@dataclass(frozen=True)
class Reused:
    """Tokens of a prompt that were there already, and how many of them have to be fed again."""

    cached_tokens: int = 0
    replayed_tokens: int = 0


class Reuse:
    """What the sequences of a session begin with and leave behind."""

    def __init__(self, session: Session, store: PrefixStore, pool: Pool | None = None) -> None:
        """Without a pool every hit is followed by a replay."""
        manifest = session.engine.manifest
        self._session = session
        self._store = store
        self._pool = pool
        self._kinds = row_kinds(manifest)
        lasting = {kind.name for kind in self._kinds}
        self._rings = {state.name: int(state.shape[1]) for state in manifest.states if state.name not in lasting}

    def begin(self, prompt: Tokens, *, slot: int = 0, mode: str | None = None, replay: int | None = None) -> Reused:
        """Begin a sequence with what there is of a prompt; the tokens from its length on remain to be fed.

        mode, replay, and errors as for `Session.prefill` of the whole prompt.
        """
        session = self._session
        session.check(prompt, mode=mode, replay=replay, chunk=None)
        tokens = content_keys(prompt)
        session.reset(slot)
        tail = len(tokens) - (session.engine.manifest.window if replay is None else replay)
        prefix = self._store.find(tokens)
        local = self._local_of(tokens, prefix, tail)
        if local is None:
            cached = self._store.load(prefix, functools.partial(self._put, slot))
        else:
            whole = self._store.aligned(len(local.tokens))
            cached = self._store.load(replace(prefix, length=whole), functools.partial(self._put, slot))
            if cached == whole:
                self._resume(local, slot)
                return Reused(len(local.tokens))
        start = self._replay_start(cached, tail)
        self._put_history(tokens[:start], slot)
        session.resume(Standing(start, kept=cached, cuts=Cuts(encoder=start, decoder=start)), slot=slot)
        return Reused(cached, cached - start)

    def end(self, prompt: Tokens, generated: Sequence[int] = (), *, slot: int = 0) -> None:
        """Keep what a sequence leaves, which was fed a prompt and tokens generated from it, the last ones maybe not."""
        session = self._session
        fed = np.concatenate([content_keys(prompt), np.array(generated, np.int32)])[: session.length(slot)]
        self._store.save(fed, functools.partial(self._rows, slot))
        if self._pool is None:
            return
        whole = self._store.aligned(len(fed))
        states = {name: session.rows(name, slot, 0, rows) for name, rows in self._rings.items()}
        tail = {
            kind.name: session.rows(kind.name, slot, whole // kind.ratio, len(fed) // kind.ratio)
            for kind in self._kinds
        }
        self._pool.put(Local(fed, session.standing(slot), states, tail))

    def _local_of(self, tokens: Ints, prefix: Prefix, tail: int) -> Local | None:
        """The local state to go on from, if there is any whose global rows are there and a replay is no shorter."""
        local = self._pool.find(tokens) if self._pool else None
        if local is None or self._store.aligned(len(local.tokens)) > prefix.length:
            return None
        return local if len(local.tokens) >= self._replay_start(prefix.length, tail) else None

    def _replay_start(self, cached: int, tail: int) -> int:
        """Where a replay begins: a window before the end of what is cached, and where the decoder's tail does."""
        return max(0, min(cached - self._session.engine.manifest.window, tail))

    def _resume(self, local: Local, slot: int) -> None:
        for name, rows in local.states.items():
            self._session.put_rows(name, slot, 0, rows)
        whole = self._store.aligned(len(local.tokens))
        for kind in self._kinds:
            self._session.put_rows(kind.name, slot, whole // kind.ratio, local.tail[kind.name])
        self._session.resume(local.standing, slot=slot)

    def _put_history(self, before: Ints, slot: int) -> None:
        """Compressed ids of the tokens before a replay: n-grams reach across its start."""
        length = self._rings.get(_HISTORY, 0)
        if not length or not len(before):
            return
        newest = np.arange(max(0, len(before) - length), len(before))
        history = np.zeros(length, np.int32)
        history[newest % length] = self._compressed_ids(before[newest])
        self._session.put_rows(_HISTORY, slot, 0, history)

    def _compressed_ids(self, tokens: Ints) -> Ints:
        """As the operation compress_tokens: the table's, −1 for an image token and within an image (keys below 0)."""
        engine = self._session.engine
        for weight in engine.manifest.weights:
            if weight.name == _COMPRESSED_IDS:
                table = engine.weights[weight.offset : weight.offset + weight.size_bytes].view(np.int32)
                image = engine.manifest.config.get("image_token_id")
                return np.where((tokens < 0) | (tokens == image), np.int32(-1), table[np.maximum(tokens, 0)])
        raise ArtifactError(f"{engine.path}: expected a weight {_COMPRESSED_IDS}, found none: compile the engine again")

    def _put(self, slot: int, name: str, begin: int, rows: Array) -> None:
        self._session.put_rows(name, slot, begin, rows)

    def _rows(self, slot: int, name: str, begin: int, end: int) -> Array:
        return self._session.rows(name, slot, begin, end)
