"""A process that uses a prefix store until it is killed: saves, finds, and exits with an error when rows are wrong.

Arguments: a manifest's file, the store's folder, its limit in bytes, a seed. Prints `hit` when something was found.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from tests.runtime.prefix_rows import Rows, rows_of
from v41c.manifest import decode
from v41c.runtime.prefix_store import PrefixStore


def main(manifest: str, folder: str, limit_bytes: str, seed: str) -> None:
    """Work until killed."""
    store = PrefixStore(folder, decode(Path(manifest).read_bytes()), limit_bytes=int(limit_bytes))
    rng = np.random.default_rng(int(seed))
    hits = 0
    while True:
        places = np.arange(rng.integers(1, 300))
        tokens = np.where(places < rng.integers(0, 200), places % 31, (places + rng.integers(0, 4)) % 31).astype(
            np.int32
        )
        rows = Rows.empty(store.kinds, len(tokens))
        length = store.load(store.find(tokens), rows.put)
        expected = rows_of(store.kinds, tokens)
        rows.require_equal(expected, length)
        hits += length > 0
        if length and hits == 1:
            print("hit", flush=True)
        store.save(tokens, expected.read)


if __name__ == "__main__":
    main(*sys.argv[1:])
