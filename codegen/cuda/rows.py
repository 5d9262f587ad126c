"""Grids of operations that take every row of a tensor in blocks of columns."""

from __future__ import annotations

from dataclasses import dataclass

from v41c.codegen.cuda.frame import Frame
from v41c.codegen.cuda.kernel import Axis
from v41c.ir.types import Dim

#: columns of a block: 8 a thread of 4 warps, which a 16-byte access of bf16 holds
_COLUMNS = 1024
_COLUMNS_PER_WARP = 256


@dataclass(frozen=True)
class RowBlocks:
    """Blocks of `columns` of each row: the grid is rows by blocks."""

    columns: int
    grid: tuple[Axis, int]
    warps: int


def row_blocks(frame: Frame, rows: Dim, width: int, most: int = _COLUMNS) -> RowBlocks:
    """Blocks for rows of `width` elements, at most `most` columns each, a power of two."""
    columns = min(most, power_of_two(width))
    return RowBlocks(columns, (frame.tiles(rows), -(-width // columns)), max(1, min(columns // _COLUMNS_PER_WARP, 16)))


def power_of_two(size: int) -> int:
    """The least power of two that is not below a size."""
    return 1 << max(size - 1, 0).bit_length()
