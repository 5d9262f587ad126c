"""Machine code of attention, the indexer and writes for Hopper at the release's sizes; tests/slow has them all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.codegen.cuda.sparse_shapes import compiled
from v41c.targets.cuda import SM_90


def test_attention(tmp_path: Path) -> None:
    """Nothing spilled; packed keys and queries 16 bytes at a time; both products on the tensor cores; two launches."""
    cubins = compiled("attend", SM_90, 1, tmp_path)
    assert set(cubins) == {"attention_part", "attention_join"}
    assert all(cubin.spill_bytes == 0 for cubin in cubins.values())
    part, join = cubins["attention_part"], cubins["attention_join"]
    # 32 mma over the width for scores, 16 for values
    assert part.instructions["mma"] >= 48
    # two of fp8, one of fp4, eight of the step's rows and of the queries, in 256 threads
    assert part.instructions["load_16_bytes"] >= 16
    assert part.shared_bytes * 2 <= SM_90.shared_bytes_per_block
    assert join.registers <= 64


def test_the_indexer(tmp_path: Path) -> None:
    """One launch; nothing spilled; scores by wgmma; two blocks of 128 threads in a multiprocessor's registers."""
    (cubin,) = compiled("index_topk", SM_90, 1, tmp_path).values()
    assert cubin.spill_bytes == 0
    assert cubin.instructions["wgmma"] >= 8
    assert cubin.registers * 32 * cubin.warps * 2 <= SM_90.registers_per_multiprocessor
    assert "atomic_float" not in cubin.instructions


@pytest.mark.parametrize("name", ["cache_write", "compress_pool"])
def test_writes(name: str, tmp_path: Path) -> None:
    (cubin,) = compiled(name, SM_90, 16, tmp_path).values()
    assert cubin.spill_bytes == 0
    assert cubin.registers <= 64
