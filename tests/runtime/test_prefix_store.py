"""The prefix store: what was saved is found, token by token and byte for byte, or not at all."""

from __future__ import annotations

import logging
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.runtime.prefix_rows import Rows, rows_of
from v41c.errors import UsageError
from v41c.manifest import Manifest, StateEntry, encode
from v41c.runtime.artifact import Engine
from v41c.runtime.prefix_store import BLOCK_TOKENS, PrefixStore

_STATES = [
    StateEntry("layers.0.compressed", "u8", ["S", "C2", 6]),
    StateEntry("layers.0.window", "u8", ["S", 4, 66]),
    StateEntry("layers.0.index_keys", "f32", ["S", "C2", 3]),
    StateEntry("layers.1.compressed", "u8", ["S", "C3", 5]),
    StateEntry("layers.2.compressed", "i32", ["S", "C1"]),
]
_BYTES_PER_TOKEN = 6 / 2 + 12 / 2 + 5 / 3 + 4
_ALIGNMENT = 6
_BLOCK = BLOCK_TOKENS // _ALIGNMENT * _ALIGNMENT


@pytest.fixture(scope="session")
def manifest(engine: Engine) -> Manifest:
    """A manifest with global states of three ratios."""
    return msgspec.structs.replace(engine.manifest, states=_STATES, dims=["T", "R", "S", "C1", "C2", "C3"])


def tokens_of(*values: int | Sequence[int]) -> np.ndarray:
    """Token ids from ids and sequences of them."""
    return np.concatenate([np.atleast_1d(np.array(value, np.int32)) for value in values])


def save(store: PrefixStore, tokens: np.ndarray) -> None:
    store.save(tokens, rows_of(store.kinds, tokens).read)


def load(store: PrefixStore, tokens: np.ndarray) -> int:
    """Tokens of a prompt that the store had; their rows are held against what was saved."""
    prefix = store.find(tokens)
    rows = Rows.empty(store.kinds, len(tokens))
    length = store.load(prefix, rows.put)
    rows.require_equal(rows_of(store.kinds, tokens), length)
    return length


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def size_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in files(folder))


# few ids and few cuts: sequences share much of what they have
sequences = st.lists(
    st.tuples(st.sampled_from([0, 3, _BLOCK, _BLOCK + 7, 3 * _BLOCK]), st.integers(0, 3 * _BLOCK), st.integers(0, 2)),
    min_size=1,
    max_size=6,
)


def sequence(cut: int, length: int, flavour: int) -> np.ndarray:
    """Tokens that agree with those of another flavour up to a cut."""
    places = np.arange(length, dtype=np.int32)
    return np.where(places < cut, places % 31, (places + flavour) % 31).astype(np.int32)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(saved=sequences, asked=sequences)
def test_the_longest_common_prefix_is_found(
    manifest: Manifest,
    tmp_path: Path,
    saved: list[tuple[int, int, int]],
    asked: list[tuple[int, int, int]],
) -> None:
    folder = tmp_path / "store"
    shutil.rmtree(folder, ignore_errors=True)
    store = PrefixStore(folder, manifest)
    kept = [sequence(*parameters) for parameters in saved]
    for tokens in kept:
        save(store, tokens)
    for tokens in [*kept, *(sequence(*parameters) for parameters in asked)]:
        shared = [
            int(np.argmin([*(a[: len(tokens)] == tokens[: len(a)]), False]))
            for a in (k[: len(k) // _ALIGNMENT * _ALIGNMENT] for k in kept)
        ]
        usable = min(max(shared), max(0, len(tokens) - 1)) // _ALIGNMENT * _ALIGNMENT
        # the same in this process and in one that starts now
        assert load(store, tokens) == load(PrefixStore(folder, manifest), tokens) == usable


def test_a_shared_prefix_is_stored_once_and_a_conversation_appends(manifest: Manifest, tmp_path: Path) -> None:
    store = PrefixStore(tmp_path, manifest)
    prompt = sequence(999, 2 * _BLOCK + 12, 0)
    save(store, prompt)
    before = {path.name: path.stat().st_ino for path in files(tmp_path)}
    assert len(before) == 3
    save(store, prompt)
    save(store, prompt[: _BLOCK + 6])
    assert {path.name: path.stat().st_ino for path in files(tmp_path)} == before
    save(store, sequence(999, 3 * _BLOCK + 18, 0))
    after = {path.name: path.stat().st_ino for path in files(tmp_path)}
    # the short last entry gave way to a whole one, the others were not touched
    assert len(after) == 4
    assert len(before.items() & after.items()) == 2


def test_an_entry_takes_its_rows_and_a_small_header(manifest: Manifest, tmp_path: Path) -> None:
    release = [
        StateEntry(f"layers.{layer}.{name}", "u8", ["S", dim, width])
        for layer, dim in ((2, "C2"), (8, "C2"), (14, "C2"), (20, "C1"))
        for name, width in (("compressed", 288), ("index_keys", 68))
    ]
    store = PrefixStore(tmp_path, msgspec.structs.replace(manifest, states=release, dims=["S", "C1", "C2"]))
    tokens = np.arange(4096, dtype=np.int32)
    save(store, tokens)
    assert len(tokens) * 890 < size_bytes(tmp_path) < len(tokens) * 890 * 1.01


def test_the_alignment_is_the_least_common_multiple(manifest: Manifest, tmp_path: Path) -> None:
    store = PrefixStore(tmp_path, manifest)
    save(store, sequence(999, 17, 0))
    assert [load(store, sequence(999, length, 0)) for length in (6, 7, 12, 13, 18, 30)] == [0, 6, 6, 12, 12, 12]
    save(store, sequence(999, 5, 1))
    assert len(files(tmp_path)) == 1


def test_another_engine_has_prefixes_of_its_own(manifest: Manifest, tmp_path: Path) -> None:
    store = PrefixStore(tmp_path, manifest)
    other = PrefixStore(tmp_path, msgspec.structs.replace(manifest, v41c_version="another"))
    tokens = sequence(999, 100, 0)
    save(store, tokens)
    assert load(other, tokens) == 0
    save(other, tokens[:30])
    assert (load(store, tokens), load(other, tokens)) == (96, 30)


def _flip(place: Callable[[int], int]) -> Callable[[bytes], bytes]:
    def damage(content: bytes) -> bytes:
        changed = bytearray(content)
        changed[place(len(content))] ^= 0x10
        return bytes(changed)

    return damage


@pytest.mark.parametrize(
    "damage",
    [
        *(_flip(lambda size, place=place: place) for place in (0, 9, 45, 75, 105, 109, 118)),
        _flip(lambda size: size - 1),
        _flip(lambda size: size // 2),
        lambda content: b"",
        lambda content: content[:50],
        lambda content: content[:-1],
        lambda content: content + b"\0",
        lambda content: b"something else",
    ],
)
@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_damaged_entry_is_refused_and_removed(
    manifest: Manifest,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[bytes], bytes],
    which: int,
) -> None:
    tokens = sequence(999, 2 * _BLOCK + 13, 0)
    store = PrefixStore(tmp_path, manifest)
    chain = list(_saved_one_by_one(store, tokens))
    chain[which].write_bytes(damage(chain[which].read_bytes()))
    with caplog.at_level(logging.WARNING):
        assert load(PrefixStore(tmp_path, manifest), tokens) == which * _BLOCK
    assert not chain[which].exists()
    [record] = caplog.records
    assert record.getMessage().startswith(f"{chain[which]}: ")
    assert record.getMessage().endswith(": removed, computed anew")
    save(store, tokens)
    assert load(store, tokens) == 2 * _BLOCK + 12


def _saved_one_by_one(store: PrefixStore, tokens: np.ndarray) -> Iterator[Path]:
    """Entries in the order of their chain."""
    known: set[Path] = set()
    for end in (*range(_BLOCK, len(tokens), _BLOCK), len(tokens)):
        save(store, tokens[:end])
        yield from set(files(store.folder)) - known
        known = set(files(store.folder))


def test_an_entry_under_another_name_is_refused(manifest: Manifest, tmp_path: Path) -> None:
    store = PrefixStore(tmp_path, manifest)
    first, second = _saved_one_by_one(store, sequence(999, 2 * _BLOCK, 0))
    second.write_bytes(first.read_bytes())
    assert load(store, sequence(999, 3 * _BLOCK, 0)) == _BLOCK
    assert files(tmp_path) == [first]


def test_an_entry_that_goes_away_is_computed_anew(manifest: Manifest, tmp_path: Path) -> None:
    store = PrefixStore(tmp_path, manifest)
    tokens = sequence(999, 3 * _BLOCK, 0)
    _, second, _ = _saved_one_by_one(store, tokens)
    prefix = store.find(tokens)
    second.unlink()
    assert store.load(prefix, lambda name, begin, rows: None) == _BLOCK


def test_other_files_are_left_alone(manifest: Manifest, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("the only copy")
    (tmp_path / "ab").mkdir()
    (tmp_path / "ab" / "notes.prefix").write_text("mine")
    (tmp_path / "ac").write_text("no folder")
    store = PrefixStore(tmp_path, manifest, limit_bytes=0)
    save(store, sequence(999, 100, 0))
    assert load(store, sequence(999, 100, 0)) == 0
    assert [path.name for path in files(tmp_path)] == ["notes.prefix", "ac", "thesis.txt"]


def test_what_was_used_longest_ago_goes_first_and_chains_from_their_end(manifest: Manifest, tmp_path: Path) -> None:
    a, b, c = (sequence(0, 3 * _BLOCK + 1, flavour) for flavour in range(3))
    save(PrefixStore(tmp_path, manifest), a[:-1])
    limit = 2 * size_bytes(tmp_path)
    store = PrefixStore(tmp_path, manifest, limit_bytes=limit)
    save(store, b)
    assert (load(store, b), load(store, a)) == (3 * _BLOCK, 3 * _BLOCK)
    for kept in (2 * _BLOCK, _BLOCK, 0):
        # every new entry costs the last one of b, which was used longest ago, until none is left
        save(store, c[: 3 * _BLOCK - kept])
        assert size_bytes(tmp_path) == limit
        assert store.find(b).length == kept
        assert store.find(a).length == 3 * _BLOCK
    assert load(store, c) == 3 * _BLOCK


def test_a_prefix_beyond_the_limit_is_kept_as_far_as_it_fits(manifest: Manifest, tmp_path: Path) -> None:
    tokens = sequence(0, 5 * _BLOCK + 1, 0)
    save(PrefixStore(tmp_path, manifest), tokens[:_BLOCK])
    limit = int(2.5 * size_bytes(tmp_path))
    store = PrefixStore(tmp_path, manifest, limit_bytes=limit)
    save(store, tokens)
    assert load(store, tokens) == 2 * _BLOCK
    assert size_bytes(tmp_path) <= limit


def test_a_path_of_a_file_is_refused(manifest: Manifest, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UsageError, match=f"prefix-cache: {path}: expected a folder, found a file"):
            PrefixStore(path, manifest)
    with pytest.raises(UsageError, match="prefix-cache-bytes: expected 0 or more, got -1"):
        PrefixStore(tmp_path, manifest, limit_bytes=-1)


def test_a_full_disk_is_one_warning(manifest: Manifest, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = PrefixStore(tmp_path / "store", manifest)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, hard))
    try:
        for flavour in range(3):
            save(store, sequence(0, 100, flavour))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path / 'store'}: prefixes cannot be kept: File too large"
    ]
    assert files(tmp_path / "store") == []
    save(store, sequence(0, 100, 0))
    assert load(store, sequence(0, 100, 0)) == 96


def test_a_folder_that_goes_away_is_one_warning(
    manifest: Manifest, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = PrefixStore(tmp_path / "store", manifest)
    (tmp_path / "store").rmdir()
    for _ in range(2):
        save(store, sequence(0, 100, 0))
        assert load(store, sequence(0, 100, 0)) == 0
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path / 'store'}: prefixes cannot be kept: No such file or directory"
    ]


def test_left_overs_of_dead_writers_are_removed_and_only_theirs(manifest: Manifest, tmp_path: Path) -> None:
    dead, alive, other = (tmp_path / f"unfinished-{name}" for name in ("0" * 32, "1" * 32, "novel.txt"))
    dead.write_bytes(b"half of")
    other.write_text("not ours")
    script = "import fcntl, sys; f = open(sys.argv[1], 'xb'); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", script, alive], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as writer:
        assert writer.stdout
        writer.stdout.readline()
        PrefixStore(tmp_path, manifest)
        assert sorted(files(tmp_path)) == [alive, other]
        writer.kill()
    PrefixStore(tmp_path, manifest)
    assert files(tmp_path) == [other]


def test_processes_share_a_folder_and_die_at_any_moment(manifest: Manifest, tmp_path: Path) -> None:
    stress(manifest, tmp_path, seconds=2.5, workers=2)


def stress(manifest: Manifest, tmp_path: Path, *, seconds: float, workers: int) -> None:
    """Keep workers busy on one folder and kill one after the other; each of them checks all rows it is given."""
    folder, description = tmp_path / "store", tmp_path / "manifest.json"
    description.write_bytes(encode(manifest))
    rng = np.random.default_rng(1)
    limit = int(20 * _BLOCK * _BYTES_PER_TOKEN)

    def start() -> subprocess.Popen[bytes]:
        arguments = [description, folder, str(limit), str(rng.integers(1 << 30))]
        return subprocess.Popen(
            [sys.executable, "-m", "tests.runtime.prefix_worker", *arguments],
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
        )

    running = [start() for _ in range(workers)]
    began, killed = time.monotonic(), 0
    while time.monotonic() - began < seconds:
        worker = running.pop(0)
        assert worker.stdout
        assert worker.stdout.readline() == b"hit\n", "a worker found wrong rows or failed"
        time.sleep(float(rng.uniform(0, 0.02)))
        assert worker.poll() is None, "a worker found wrong rows or failed"
        worker.kill()
        worker.communicate()
        killed += 1
        running.append(start())
    for worker in running:
        worker.kill()
        worker.communicate()
    assert killed >= 3
    store = PrefixStore(folder, manifest, limit_bytes=limit)
    assert not [path for path in files(folder) if not path.name.endswith(".prefix")]
    tokens = sequence(0, 4 * _BLOCK, 0)
    save(store, tokens)
    assert load(store, tokens) >= 3 * _BLOCK
    assert size_bytes(folder) <= limit
