"""Machine code of routing and experts for Hopper at the release's sizes, as far as it can be judged without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.codegen.cuda.expert_shapes import compiled, gate, layer
from v41c.targets.cuda import SM_90


@pytest.mark.parametrize("tokens", [1, 16])
@pytest.mark.parametrize("packed", [False, True])
def test_experts(packed: bool, tokens: int, tmp_path: Path) -> None:
    """Nothing spilled; fp4 comes 16 bytes at a time; three blocks of 128 threads fit into a multiprocessor's registers.

    Few tokens are multiplied as wgmma, whose first operand is the weight. Packed rows are half as many bytes to copy.
    """
    cubins = compiled(layer(packed), SM_90, tokens, tmp_path)
    assert set(cubins) == {"expert_hidden", "expert_outputs"}
    for cubin in cubins.values():
        assert cubin.spill_bytes == 0
        assert cubin.registers * 32 * cubin.warps * 3 <= SM_90.registers_per_multiprocessor
        assert "atomic_float" not in cubin.instructions
        if tokens == 1:
            assert cubin.instructions["load_16_bytes"] >= 6
            assert "wgmma" not in cubin.instructions
        else:
            assert cubin.instructions["wgmma"] >= 16
            assert cubin.instructions["async_copy_16_bytes"] >= (12 if packed else 16)


@pytest.mark.parametrize("tokens", [1, 16])
def test_the_router(tokens: int, tmp_path: Path) -> None:
    (cubin,) = compiled(gate(), SM_90, tokens, tmp_path).values()
    assert cubin.spill_bytes == 0
    assert "atomic_float" not in cubin.instructions
    assert cubin.instructions["load_16_bytes" if tokens == 1 else "async_copy_16_bytes"] >= 8
    assert ("mma" in cubin.instructions) == (tokens > 1)
