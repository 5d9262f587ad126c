"""The peak memory of a step is stated at compile time, met to the byte, and does not depend on the prompt's length.

`tests/slow/test_memory.py` says the same of a model that does not fit into the caches.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.memory_of_steps import highest_touched, measured_prefill
from v41c.compile import compile
from v41c.frontend.presets import TRAINED_CHECKPOINT
from v41c.inspect import inspect
from v41c.runtime.artifact import load

LENGTHS = (512, 2048, 4096)
#: what allocator and Python vary by, measured at 0.8 MB. Scores f32 [T, C2] of a chunk of 512 tokens would grow by
#: 3.7 MB from the first length to the last, at the ratio 2 of this model
SLACK_BYTES = 2 << 20


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained model."""
    folder = tmp_path_factory.mktemp("memory") / "engine"
    compile(TRAINED_CHECKPOINT, folder)
    return folder


def test_a_full_chunk_touches_the_stated_peak_and_no_byte_more(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load(engine)
    stated = {graph: loaded.programs(graph)[-1].arena_bytes for graph in ("encoder", "decoder")}
    assert highest_touched(loaded, monkeypatch) == stated
    # the column "peak memory" of `v41c inspect`
    assert inspect(engine).passes[-1].peak_bytes == max(stated.values())


@pytest.mark.parametrize("mode", ["ced", "full"])
def test_memory_is_no_matter_of_the_prompt(engine: Path, mode: str) -> None:
    found = [measured_prefill(engine, length, mode) for length in LENGTHS]
    peaks = [growth.peak_bytes for growth in found]
    assert max(peaks) - min(peaks) < SLACK_BYTES, peaks
    assert all(growth.allocated_bytes < growth.stated_bytes for growth in found), found
