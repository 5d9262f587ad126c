"""A few random models through the whole pipeline; `tests/slow/test_random_models.py` runs many."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.random_models import run_random_model, write_random_model

#: layer plans with ratio 3 under 4, only windows, an Engram in the decoder, one head, bf16 with drafts
SEEDS = (0, 2, 6, 9)


@pytest.mark.parametrize("seed", SEEDS)
def test_an_exact_engine_equals_the_eager_model(seed: int, tmp_path: Path) -> None:
    write_random_model(tmp_path, seed)
    passes = ("all", "-fuse-mhc", "-split-encoder-decoder", "-plan-memory")[SEEDS.index(seed)]
    outcome = run_random_model(tmp_path, seed, "exact", passes)
    assert outcome.finite
    assert outcome.same_in_one_piece  # to the last bit
    assert outcome.relative < 1e-4  # the criterion of exact arithmetic
