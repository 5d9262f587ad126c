"""What `tests/test_memory.py` says of the shipped model, of one that does not fit into the caches: preset small.

pytest tests/slow/test_memory.py
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.memory_of_steps import highest_touched, measured_prefill
from v41c.compile import compile
from v41c.init import init
from v41c.inspect import inspect
from v41c.runtime.artifact import load

#: as there: scores f32 [T, C2] would grow by 3.7 MB
SLACK_BYTES = 2 << 20


def test_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    init(tmp_path / "model", "small")
    compile(tmp_path / "model", tmp_path / "engine")
    engine = load(tmp_path / "engine")
    stated = {graph: engine.programs(graph)[-1].arena_bytes for graph in ("encoder", "decoder")}
    assert highest_touched(engine, monkeypatch) == stated
    assert inspect(tmp_path / "engine").passes[-1].peak_bytes == max(stated.values())
    for mode in ("ced", "full"):
        found = [measured_prefill(tmp_path / "engine", length, mode) for length in (512, 2048, 4096)]
        peaks = [growth.peak_bytes for growth in found]
        assert max(peaks) - min(peaks) < SLACK_BYTES, peaks
        assert all(growth.allocated_bytes < growth.stated_bytes for growth in found), found
