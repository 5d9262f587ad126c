"""Two hundred random models, exact and release arithmetic, any one pass left out: half an hour on two cores.

pytest tests/slow/test_random_models.py
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.random_models import run_random_model, write_random_model
from v41c.passes.pipeline import REQUIRED, pass_names

OPTIONAL = ["all", *(f"-{name}" for name in pass_names() if name not in REQUIRED)]


@pytest.mark.parametrize("seed", range(200))
def test_engines_of_a_random_model(seed: int, tmp_path: Path) -> None:
    """Every fourth has a vision tower, and images in its prompt."""
    write_random_model(tmp_path, seed, vision=seed % 4 == 3)
    passes = OPTIONAL[seed % len(OPTIONAL)]
    exact = run_random_model(tmp_path, seed, "exact", passes)
    assert (exact.finite, exact.interpreted, exact.same_in_one_piece, exact.taken_back) == (True,) * 4
    assert max(exact.relative, exact.drafts) < 1e-4
    release = run_random_model(tmp_path, seed, "release", passes)
    assert (release.finite, release.interpreted, release.same_in_one_piece, release.taken_back) == (True,) * 4
    # random models are chaotic in release arithmetic: a sanity bound, as for the golden cases
    assert release.median < 0.15
