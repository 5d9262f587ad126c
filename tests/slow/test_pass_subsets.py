"""Every subset of the passes that may be left out: some minutes.

pytest tests/slow/test_pass_subsets.py
"""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest

from tests.subsets import OPTIONAL, Subsets


def test_no_bit_moves_in_any_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subsets = Subsets(tmp_path, monkeypatch)
    plain = subsets.steps(())
    for count in range(1, len(OPTIONAL) + 1):
        for passes in combinations(OPTIONAL, count):
            found = subsets.steps(passes)
            assert found.keys() == plain.keys()
            moved = [name for name, wanted in plain.items() if found[name].tobytes() != wanted.tobytes()]
            assert not moved, (passes, moved)
