"""What dense kernels are made of on one architecture, at the shapes of a release; tests/slow has them all.

A boundary's floor on an H200 of 4.8 TB/s: (2n + 2)·d = 10·d values of 2 bytes a token, 102,400 bytes: 1.4 us for 64
tokens, 87 us for 4,096; with the weight of the coefficients, 2 MB read once, 1.8 us and 88 us. Predicted by
`boundary_seconds`, not measured: 88 us and 10 us for the last tile's tail at 4,096 tokens; at 64, 1.8 us and 7 us.
"""

from __future__ import annotations

from math import ceil
from pathlib import Path

import pytest

from tests.codegen.cuda.dense_cases import COPIES, OUTPUTS, WIDTH, check_code, kernel_of, tensor_cores
from v41c.targets.cuda import SM_90, CudaTarget

#: seconds for a load from the second-level cache and for a count there, on Hopper: some 0.3 us each way under load
CACHE_SECONDS = 0.7e-6
#: seconds for a step of the normalisations in turn: two shuffles, a division
STEP_SECONDS = 50e-9
STREAM_BYTES = (2 * COPIES + 2) * WIDTH * 2
WEIGHT_BYTES = 4 * OUTPUTS * COPIES * WIDTH


def boundary_seconds(tokens: int, target: CudaTarget) -> tuple[float, float]:
    """Memory's time of a boundary, and the time of the last tile's tail, which nothing overlaps.

    The tail: a count, the partial sums in rounds of three stages, the mix in rounds of three stages, 40
    normalisations.
    """
    constants = kernel_of("boundary", tokens, target).launches[0].function.constants
    rows, chunks, columns = (int(constants[name] or 0) for name in ("BT", "CHUNKS", "TAIL"))
    sums = max(1, 4096 // (rows * 32))
    rounds = ceil(ceil(chunks / sums) / 3) + ceil(ceil(WIDTH / columns) / 3)
    tail = CACHE_SECONDS * (1 + rounds) + 40 * STEP_SECONDS
    return (tokens * STREAM_BYTES + WEIGHT_BYTES) / target.memory_bytes_per_second, tail


@pytest.mark.parametrize(("tokens", "floor"), [(64, 1.8e-6), (4096, 88e-6)])
def test_a_boundary_is_bound_by_what_it_must_read_and_write(tokens: int, floor: float) -> None:
    """One launch; partial sums of 5 % of the stream's bytes, written and read in the cache, are all that is added."""
    kernel = kernel_of("boundary", tokens, SM_90)
    memory, tail = boundary_seconds(tokens, SM_90)
    print(f"{tokens} tokens: {memory * 1e6:.1f} us of memory, {tail * 1e6:.1f} us of tail")
    assert len(kernel.launches) == 1
    assert memory == pytest.approx(floor, rel=0.03)
    assert tail < 11e-6
    assert kernel.workspace_bytes <= 0.051 * tokens * STREAM_BYTES


@pytest.mark.parametrize("tokens", [16, 512])
def test_a_boundary(tokens: int, tmp_path: Path) -> None:
    """Registers for two blocks of a multiprocessor or more, whose loads overlap; what is in flight is 16 bytes each."""
    (cubin,) = check_code("boundary", tokens, SM_90, tmp_path).values()
    blocks = 4 if tokens == 16 else 2
    assert cubin.registers * 32 * cubin.warps * blocks <= SM_90.registers_per_multiprocessor
    assert cubin.shared_bytes * blocks <= SM_90.shared_bytes_per_block
    assert ("mma" in cubin.instructions) == (tokens == 512)


@pytest.mark.parametrize("tokens", [1, 16])
def test_a_boundary_that_packs(tokens: int, tmp_path: Path) -> None:
    """One launch as well; three blocks of a multiprocessor, of which 16 tokens have 2.4."""
    assert len(kernel_of("packed boundary", tokens, SM_90).launches) == 1
    (cubin,) = check_code("packed boundary", tokens, SM_90, tmp_path).values()
    assert cubin.registers * 32 * cubin.warps * 3 <= SM_90.registers_per_multiprocessor
    assert cubin.shared_bytes * 3 <= SM_90.shared_bytes_per_block


@pytest.mark.parametrize("tokens", SM_90.variants)
@pytest.mark.parametrize("name", ["fp8", "packed fp8"])
def test_a_product(name: str, tokens: int, tmp_path: Path) -> None:
    """The weight comes in asynchronous copies of 16 bytes, two blocks of a multiprocessor or more at a time."""
    (cubin,) = check_code(name, tokens, SM_90, tmp_path).values()
    assert cubin.instructions["async_copy_16_bytes"] > 0
    assert (tensor_cores(SM_90) in cubin.instructions) == (tokens > 1)
    assert cubin.registers * 32 * cubin.warps * 2 <= SM_90.registers_per_multiprocessor
    assert cubin.shared_bytes * 2 <= SM_90.shared_bytes_per_block


def test_a_group_of_products_needs_no_more_than_one(tmp_path: Path) -> None:
    """The weights share a loop and its memory."""
    (one,) = check_code("fp8", 16, SM_90, tmp_path).values()
    (group,) = check_code("group", 16, SM_90, tmp_path).values()
    assert group.shared_bytes == one.shared_bytes
    assert tensor_cores(SM_90) in group.instructions
