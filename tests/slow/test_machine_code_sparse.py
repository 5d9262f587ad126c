"""Attention, the indexer and cache writes of the release for every architecture and number of tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.codegen.cuda.sparse_shapes import cases, compiled
from v41c.targets.cuda import TARGETS, CudaTarget


@pytest.mark.parametrize("tokens", [1, 16, 512])
@pytest.mark.parametrize("name", cases())
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_code(target: CudaTarget, name: str, tokens: int, tmp_path: Path) -> None:
    """Products of packed keys run on the tensor cores, and steps of few tokens spill nothing.

    With many tokens, where 64 heads fill the registers with their sums, addresses that a loop does not change are
    spilled before it.
    """
    cubins = compiled(name, target, tokens, tmp_path)
    for function, cubin in cubins.items():
        assert "atomic_float" not in cubin.instructions
        if function in ("attention_part", "index_part") and not name.startswith("exact"):
            assert {"mma", "wgmma", "tcgen05"} & set(cubin.instructions)
        if function == "attention_part" and tokens > 16:
            assert cubin.spill_bytes <= 1024
        else:
            assert cubin.spill_bytes == 0
