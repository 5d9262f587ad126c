"""Any pass can be left out: engines of a model with every feature are the same to the last bit, whatever was fused.

`tests/slow/test_pass_subsets.py` runs every subset.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import numpy as np
import pytest

from tests.subsets import OPTIONAL, Subsets

LEFT_OUT = [tuple(name for name in OPTIONAL if name != one) for one in OPTIONAL]
ALONE = [(one,) for one in OPTIONAL]


@pytest.fixture(scope="module")
def subsets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subsets]:
    """Engines of a random model."""
    with pytest.MonkeyPatch.context() as patch:
        yield Subsets(tmp_path_factory.mktemp("subsets"), patch)


@pytest.fixture(scope="module")
def plain(subsets: Subsets) -> dict[str, np.ndarray]:
    """What the engine gives that was made without any of them."""
    return subsets.steps(())


def _random(count: int) -> list[tuple[str, ...]]:
    r = Random(0)
    return [tuple(name for name in OPTIONAL if r.random() < 0.5) for _ in range(count)]


@pytest.mark.parametrize("passes", [OPTIONAL, *LEFT_OUT, *ALONE, *_random(10)], ids=" ".join)
def test_no_bit_moves(passes: tuple[str, ...], subsets: Subsets, plain: dict[str, np.ndarray]) -> None:
    found = subsets.steps(passes)
    assert np.isfinite(plain["chunks"]).all()
    assert found.keys() == plain.keys()
    for name, wanted in plain.items():
        assert found[name].tobytes() == wanted.tobytes(), name
