"""Profiles: measured when they must be, read when they may be, kept whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tests.runtime.fake_engine import BLOCK, SLOTS
from v41c.errors import UsageError
from v41c.runtime import profile as profiles
from v41c.runtime.artifact import load
from v41c.runtime.profile import Profile, profile_path, some_tokens
from v41c.runtime.session import Session

PROFILE = Profile("e", "m", [1, 2, 4], [1.0, 1.5, 2.0], [0.5, 0.6, 0.8], [[1, 2, 3], [2, 4, 6], [5, 6]])


def session_of(folder: Path, slots: int = SLOTS) -> Session:
    return Session(load(folder), slots=slots, drafting=True)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by an entry for each measurement."""
    done: list[str] = []
    measure = profiles._Measurement.profile

    def noted(self: profiles._Measurement, engine: str) -> Profile:
        done.append(engine)
        return measure(self, engine)

    monkeypatch.setattr(profiles._Measurement, "profile", noted)
    monkeypatch.setattr(profiles, "_SECONDS", 0.0)
    return done


def test_times_between_those_measured() -> None:
    assert [PROFILE.plain(n) for n in (1, 2, 3, 4, 8)] == [1.0, 1.5, 1.75, 2.0, 4.0]
    assert PROFILE.draft(3) == pytest.approx(0.7)
    # by the mean tokens of a sequence: 1.5 of 2 sequences, 2 of 3, more than a step of 4 had room for
    assert PROFILE.verify(1, 3) == 3.0
    assert PROFILE.verify(2, 3) == 3.0
    assert PROFILE.verify(3, 6) == (4 + 6) / 2
    assert PROFILE.verify(4, 12) == 6 * 1.5


def test_a_profile_is_measured_once_and_read_by_others(folder: Path, measured: list[str]) -> None:
    session = session_of(folder)
    found = session.times()
    assert found is not None
    assert session.times() is found
    assert profile_path(session.engine) == folder.parent / "toy.profile.json"
    assert session_of(folder).times() == session_of(folder, 1).times() == found
    assert len(measured) == 1
    assert found.batches == [1, 2, 3]
    # a step of the toy engine takes 8 tokens
    assert [len(row) for row in found.verify_seconds] == [1 + BLOCK, 1 + BLOCK, 2]
    assert [path.name for path in folder.parent.iterdir()] == ["toy", "toy.profile.json"]


def test_measuring_leaves_the_session_as_it_was(folder: Path, measured: list[str]) -> None:
    session = session_of(folder)
    session.drafting = False
    session.times()
    assert measured
    assert not session.drafting
    assert [session.length(slot) for slot in range(SLOTS)] == [0] * SLOTS
    np.testing.assert_array_equal(session.prefill([1, 2, 3]), Session(load(folder)).prefill([1, 2, 3]))


def test_a_session_in_use_is_not_disturbed(folder: Path, measured: list[str]) -> None:
    session = session_of(folder)
    session.prefill([1, 2, 3], slot=1)
    assert session.times() is None
    session_of(folder).times()
    assert session.times() is not None
    assert session.length(1) == 3
    assert len(measured) == 1


def test_a_context_too_short_to_measure_in_has_no_times(folder: Path) -> None:
    assert Session(load(folder), max_context=BLOCK + 2, drafting=True).times() is None
    assert Session(load(folder), max_context=BLOCK + 3, drafting=True).times() is not None


def changed(**fields: object) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return change


def deeper(path: Path) -> None:
    path.write_text("[" * 100_000)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "another engine": changed(engine="0" * 64),
    "another machine": changed(machine="Z80, 1 processors"),
    "fewer sequences": changed(batches=[1]),
    "sequences out of order": changed(batches=[1, 3, 2]),
    "no time": changed(plain_seconds=[1.0, 1.0]),
    "a negative time": changed(draft_seconds=[1.0, -1.0, 1.0]),
    "a missing row": changed(verify_seconds=[[1.0]]),
    "an empty row": changed(verify_seconds=[[1.0], [], [1.0]]),
    "another type": changed(plain_seconds="long"),
    "half of it": lambda path: path.write_bytes(path.read_bytes()[:100]),
    "bytes": lambda path: path.write_bytes(b"\xff\xfe\x00"),
    "nothing": lambda path: path.write_bytes(b""),
    "depth": deeper,
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_what_is_not_the_profile_is_measured_again(folder: Path, measured: list[str], name: str) -> None:
    session_of(folder).times()
    path = folder.parent / "toy.profile.json"
    DAMAGE[name](path)
    found = session_of(folder).times()
    assert found is not None
    assert len(measured) == 2
    if name != "a folder":  # which nothing can be put in the place of
        assert msgspec.json.decode(path.read_bytes(), type=Profile) == found
    assert len(list(folder.parent.iterdir())) == 2


def test_a_number_of_threads_is_another_machine(folder: Path, measured: list[str]) -> None:
    session_of(folder).times()
    Session(load(folder), drafting=True, threads=1).times()
    assert len(measured) == 2


def test_a_folder_that_cannot_be_written_to_is_no_obstacle(
    folder: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, content: bytes) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "write_bytes", refuse)
    session = session_of(folder)
    assert session.times() is session.times() is not None
    assert len(measured) == 1
    assert [path.name for path in folder.parent.iterdir()] == ["toy"]


def test_times_need_a_session_for_drafting(folder: Path) -> None:
    with pytest.raises(UsageError, match="times: open the session with drafting=True"):
        Session(load(folder)).times()


def test_tokens_are_ordinary_ones(folder: Path) -> None:
    engine = load(folder)
    tokens = set(some_tokens(engine, 5000).tolist())
    assert tokens == set(range(engine.manifest.vocabulary)) - {engine.manifest.draft_noise_token}
