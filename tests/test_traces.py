"""Traces from the cache: equal to new ones, and made anew where the cache is damaged or cannot be written."""

from __future__ import annotations

from pathlib import Path

import pytest

import v41c.compile
from tests.traced import traced
from v41c.compile import Source
from v41c.ir.graph import Module
from v41c.ir.text import print_module
from v41c.traces import kept_trace

CASES = ("case_02", "case_00")


@pytest.fixture
def source() -> Source:
    """The smallest golden case."""
    return traced(CASES[0])[0]


@pytest.fixture
def wanted() -> str:
    """Its trace."""
    return print_module(traced(CASES[0])[1])


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Source]:
    """An empty cache, and the sources that have been traced since."""
    made: list[Source] = []
    modules = [traced(case) for case in CASES]

    def counted(source: Source) -> Module:
        made.append(source)
        return next(module for known, module in modules if known is source)

    monkeypatch.setattr(v41c.compile, "trace_source", counted)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return made


def test_a_model_is_traced_once(source: Source, wanted: str, traces: list[Source]) -> None:
    assert print_module(kept_trace(source)) == wanted
    assert print_module(kept_trace(source)) == wanted
    assert len(traces) == 1
    assert print_module(kept_trace(traced(CASES[1])[0])) != wanted
    assert len(traces) == 2


@pytest.mark.parametrize("damage", [b"", b"0" * 64 + b"\n", b"\xff\xfe"])
def test_what_is_damaged_is_made_anew(
    source: Source, wanted: str, traces: list[Source], tmp_path: Path, damage: bytes
) -> None:
    kept_trace(source)
    (file,) = (tmp_path / "v41c" / "traces").iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage + whole[len(damage) : -20])
    assert print_module(kept_trace(source)) == wanted
    assert len(traces) == 2
    assert file.read_bytes() == whole


def test_a_cache_is_no_condition(
    source: Source, wanted: str, traces: list[Source], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert print_module(kept_trace(source)) == wanted
