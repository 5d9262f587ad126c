"""An engine's folder takes its place complete or not at all, and never the place of anything else."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

import pytest

from v41c.codegen import artifact
from v41c.codegen.artifact import new_folder
from v41c.errors import ArtifactError, UsageError


def write_engine(folder: Path, content: str) -> None:
    """What the replacement rule takes for an engine."""
    (folder / "part").write_text(content)
    (folder / "manifest.json").write_text(json.dumps({"format_version": 1, "files": {"part": {}}}))


def interrupted_after_a_file(destination: Path) -> None:
    with new_folder(destination) as folder:
        (folder / "part").write_text("half")
        raise KeyboardInterrupt


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_new_folder_appears_when_the_block_ends(tmp_path: Path) -> None:
    with new_folder(tmp_path / "a" / "engine") as folder:
        write_engine(folder, "new")
        assert not (tmp_path / "a" / "engine").exists()
    assert names(tmp_path / "a") == ["engine"]
    assert (tmp_path / "a" / "engine" / "part").read_text() == "new"


def test_a_failure_leaves_nothing_not_even_the_parents_it_made(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        interrupted_after_a_file(tmp_path / "a" / "b" / "engine")
    assert names(tmp_path) == []


def test_an_engine_is_replaced_and_a_failure_keeps_it(tmp_path: Path) -> None:
    for content in ("old", "new"):
        with new_folder(tmp_path / "engine") as folder:
            write_engine(folder, content)
    with pytest.raises(ArtifactError, match="cannot be written: No space left"), new_folder(tmp_path / "engine"):
        raise OSError(28, "No space left on device")
    assert names(tmp_path) == ["engine"]
    assert (tmp_path / "engine" / "part").read_text() == "new"


def test_an_interruption_between_the_renames_brings_the_old_engine_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with new_folder(tmp_path / "engine") as folder:
        write_engine(folder, "old")
    rename, calls = os.rename, []

    def interrupted(source: Path, target: Path) -> None:
        calls.append(target)
        if len(calls) == 2:
            raise KeyboardInterrupt
        rename(source, target)

    monkeypatch.setattr(artifact.os, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt), new_folder(tmp_path / "engine") as folder:
        write_engine(folder, "new")
    assert names(tmp_path) == ["engine"]
    assert (tmp_path / "engine" / "part").read_text() == "old"


@pytest.mark.parametrize(
    "manifest",
    ['{"manifest_version": 3}', "no json", '{"format_version": 1, "files": {}}', "[]", '{"format_version": 1}'],
)
def test_a_folder_that_is_no_engine_is_kept(tmp_path: Path, manifest: str) -> None:
    """A manifest.json alone does not make one, nor do files beside it that it does not list."""
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "manifest.json").write_text(manifest)
    (tmp_path / "work" / "precious").write_text("mine")
    with pytest.raises(UsageError, match="work: expected an engine folder to replace or a free name"):
        new_folder(tmp_path / "work").__enter__()
    assert names(tmp_path / "work") == ["manifest.json", "precious"]


def test_a_file_or_a_link_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name, found in (("file", "something else"), ("link", "a symbolic link")):
        with pytest.raises(UsageError, match=f"{name}: expected .* found {found}"):
            new_folder(tmp_path / name).__enter__()
    assert names(tmp_path) == ["file", "link"]


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    kept = {"held": ".e.a1b2c3d4", "fresh": ".e.zzzzzzzz", "other": ".f.abcdefgh", "engine": ".e.original"}
    for name in (".e.abcdefgh", *kept.values()):
        (tmp_path / name / "graphs").mkdir(parents=True)
    (tmp_path / kept["engine"] / "manifest.json").touch()
    for folder in tmp_path.iterdir():
        if folder.name != kept["fresh"]:
            os.utime(folder, (0, 0))
    handle = os.open(tmp_path / kept["held"], os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with new_folder(tmp_path / "e") as folder:
            os.utime(folder, (0, 0))
            with new_folder(tmp_path / "e"):  # another process would leave this one's folder alone
                assert folder.is_dir()
    finally:
        os.close(handle)
    assert set(names(tmp_path)) == {"e", *kept.values()}
