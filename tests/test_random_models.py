"""Twenty random models through the whole pipeline, made cheap; `tests/slow/test_random_models.py` runs two hundred.

Kernels take most of the time: these models have few layers, and most engines one kernel per operation instead of two.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from tests.random_models import random_config, random_vision, run_random_model, write_random_model
from tests.variants import compile_variants
from v41c.passes.pipeline import REQUIRED, pass_names

MOST_LAYERS = 4
#: with towers whose heads have 12 and 8 values, and whose rows are of 4 patches and of 1
VISION_SEEDS = (4, 6)
#: a quarter with draft heads, the others without
SEEDS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 13, 15, 16, 20, 21, 22, 24, 25)
OPTIONAL = tuple(name for name in pass_names() if name not in REQUIRED)


def variants(place: int, seed: int) -> tuple[int, ...]:
    """Token counts that programs are made for: one or 24, sometimes both."""
    if place % 10 == 0:
        return (1, 24)
    # a draft block is one step
    return (24,) if random_config(seed, MOST_LAYERS)["n_mtp_layers"] or place % 10 == 5 else (1,)


@pytest.mark.parametrize(("place", "seed"), list(enumerate(SEEDS)))
def test_an_exact_engine_equals_interpreter_and_eager_model(
    place: int, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_variants(monkeypatch, variants(place, seed))
    write_random_model(tmp_path, seed, MOST_LAYERS)
    passes = f"-{OPTIONAL[place // 2 % len(OPTIONAL)]}" if place % 2 else "all"
    outcome = run_random_model(tmp_path, seed, "exact", passes)
    assert outcome.finite
    assert outcome.interpreted  # to the last bit
    assert outcome.same_in_one_piece  # to the last bit
    assert outcome.taken_back  # to the last byte
    assert max(outcome.relative, outcome.drafts) < 1e-4  # the criterion of exact arithmetic


@pytest.mark.parametrize("seed", VISION_SEEDS)
def test_a_model_with_images_equals_interpreter_and_eager_model(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three images among the tokens, cut by steps anywhere."""
    compile_variants(monkeypatch, (24,))
    write_random_model(tmp_path, seed, 2, vision=True)
    outcome = run_random_model(tmp_path, seed, "exact", "all")
    assert (outcome.finite, outcome.interpreted, outcome.same_in_one_piece, outcome.taken_back) == (True,) * 4
    assert max(outcome.relative, outcome.drafts) < 1e-4


def test_the_vision_towers_differ() -> None:
    towers = [random_vision(seed) for seed in VISION_SEEDS]
    assert all(len({tower[key] for tower in towers}) > 1 for key in ("vision_n_heads", "vision_downsample_ratio"))
    assert len({tower["vision_dim"] // tower["vision_n_heads"] for tower in towers}) == len(towers)


def test_the_models_differ() -> None:
    """Among them is everything that a layer plan and its sizes can do to the pipeline."""
    configs = [random_config(seed, MOST_LAYERS) for seed in SEEDS]
    layers = [config["n_layers"] for config in configs]
    ratios = [config["compress_ratios"][:count] for config, count in zip(configs, layers, strict=True)]
    assert {ratio for plan in ratios for ratio in plan} == {0, 1, 2, 3, 4}
    assert {config["hc_mult"] for config in configs} == {2, 3, 4}
    assert {config["o_groups"] for config in configs} >= {1, 2, 3, 4}
    assert any(len(config["kv_source_layers"]) > 1 for config in configs)
    assert any(not config["kv_source_layers"] for config in configs)
    assert any(len({a, b} - {0}) == 2 for plan in ratios for a, b in pairwise(plan))
    for key, value in (("n_mtp_layers", 2), ("dtype", "bf16"), ("expert_dtype", "fp4"), ("original_seq_len", 64)):
        assert any(config[key] == value for config in configs), key
    for key in ("candidate_source_layer", "engram_layer_ids", "dspark_markov_rank"):
        assert 3 < sum(key in config for config in configs) < len(configs), key
