"""The order of blocks, which a GPU leaves open and Triton's interpreter does not: here it can be turned round."""

from __future__ import annotations

import pytest
from triton.runtime import interpreter


def reverse_blocks(patch: pytest.MonkeyPatch) -> None:
    """Let launches begin with their last block."""
    builder = interpreter.interpreter_builder
    choose = builder.set_grid_idx

    def choose_reversed(x: int, y: int, z: int) -> None:
        sizes = builder.grid_dim
        choose(sizes[0] - 1 - x, sizes[1] - 1 - y, sizes[2] - 1 - z)

    patch.setattr(builder, "set_grid_idx", choose_reversed)
