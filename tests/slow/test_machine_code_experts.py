"""Routing and experts of the release for every architecture and number of tokens: they compile, and nothing spills."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.codegen.cuda.expert_shapes import compiled, gate, layer
from v41c.ir.types import DType
from v41c.targets.cuda import TARGETS, CudaTarget


@pytest.mark.parametrize("tokens", [1, 16, 512])
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_nothing_spills(target: CudaTarget, tokens: int, tmp_path: Path) -> None:
    products = "tcgen05" if target.has_tcgen05 else "wgmma" if target.has_wgmma else "mma"
    for case in (gate(), layer(), layer(packed=True)):
        rows = case[1][0]
        for name, cubin in compiled(case, target, tokens, tmp_path).items():
            assert cubin.spill_bytes == 0, name
            assert "atomic_float" not in cubin.instructions
            if name.startswith("expert_"):
                assert (products in cubin.instructions) == (tokens > 1)
                scaled = target.has_block_scaled_mma and tokens > 1 and rows is not None and rows.dtype == DType.U8
                assert ("block_scaled" in cubin.instructions) == scaled
