"""The prefix store under many processes that are killed, for a minute.

pytest tests/slow/test_prefix_store.py
"""

from __future__ import annotations

from pathlib import Path

from tests.runtime.conftest import built, engine
from tests.runtime.test_prefix_store import manifest, stress
from v41c.manifest import Manifest

__all__ = ["built", "engine", "manifest"]  # fixtures


def test_a_minute_of_killed_processes(manifest: Manifest, tmp_path: Path) -> None:
    stress(manifest, tmp_path, seconds=60, workers=4)
