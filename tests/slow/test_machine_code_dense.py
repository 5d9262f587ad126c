"""What every dense kernel is made of on every architecture, at the shapes of a release: some seconds each."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.codegen.cuda.dense_cases import CASES, check_code, tensor_cores
from v41c.targets.cuda import TARGETS, CudaTarget


@pytest.mark.parametrize("tokens", [1, 16, 512])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_code(target: CudaTarget, name: str, tokens: int, tmp_path: Path) -> None:
    made = check_code(name, tokens, target, tmp_path)
    products = ("fp8", "bf16", "group", "groups of heads")
    if name.removeprefix("packed ") in products and tokens > 1:
        assert all(tensor_cores(target) in cubin.instructions for cubin in made.values())


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_a_boundary_of_many_tokens(target: CudaTarget, tmp_path: Path) -> None:
    """64 tokens a tile, whose products have rows for every kind of tensor core."""
    (cubin,) = check_code("boundary", 4096, target, tmp_path).values()
    assert tensor_cores(target) in cubin.instructions
