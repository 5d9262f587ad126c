"""What becomes of scored rows: the best of them, or the blocks that the best lie in, as rows of a result."""

from __future__ import annotations

from collections.abc import Callable

from tvm.script.ir_builder import tirx as T

from v41c.codegen.cpu.index_scores import IndexScores
from v41c.codegen.cpu.selection import LOWEST, Selection, order_keys
from v41c.codegen.cpu.sparse import array, fill
from v41c.codegen.cpu.tir import LANES, Buffer, Expr, at, cast, i64, let, local, loop, put, when


def visible_rows(positions: Buffer, ratio: int, token: Expr) -> Expr:
    """How many rows of a cache of one row for `ratio` tokens a token sees."""
    return cast((positions[token] + 1) // T.int32(ratio), "int64")


class RowChoice:
    """The `topk` best rows of every token, ascending; −1 fills the end."""

    def __init__(self, out: Buffer, topk: int) -> None:
        self._out, self.topk = out, topk

    def write_first(self, token: Expr, count: Expr) -> None:
        """Choose the first `count` rows, whatever their scores: no more than there are places."""
        _put_row(self._out, self.topk, token, count, lambda i: cast(i, "int32"))

    def write(self, token: Expr, memory: Buffer, ids: Expr, count: Expr) -> None:
        """Choose `count` rows that lie in memory."""
        _put_row(self._out, self.topk, token, count, lambda i: memory[ids + i])


class BlockChoice:
    """The `blocks` best blocks of `block` rows of every token, ascending, the newest among them; −1 fills the end.

    The newest has its place anyway, so the `older` are scored for the places that are left.
    """

    def __init__(self, out: Buffer, blocks: int, block: int) -> None:
        self._out, self._blocks, self.block = out, blocks, block
        self.places = blocks - 1

    def older(self, visible: Expr) -> Expr:
        """How many blocks there are before that of the newest visible row."""
        return T.max(visible - 1, i64(0)) // i64(self.block)

    def write_first(self, token: Expr, visible: Expr) -> None:
        """Choose every block with a visible row: no more than there are places."""
        total = let((visible + (self.block - 1)) // i64(self.block))
        _put_row(self._out, self._blocks, token, total, lambda i: cast(i, "int32"))

    def write(self, token: Expr, memory: Buffer, ids: Expr, count: Expr, newest: Expr) -> None:
        """Choose `count` blocks that lie in memory, and the newest."""
        with loop(count) as i:
            put(self._out, token * self._blocks + i, memory[ids + i])
        put(self._out, token * self._blocks + count, cast(newest, "int32"))
        fill(self._out, token * self._blocks + count + 1, self.places - count, T.int32(-1))


def _put_row(out: Buffer, size: int, token: Expr, count: Expr, number: Callable[[Expr], Expr]) -> None:
    """`count` of the numbers of a token's row, −1 behind them."""
    with loop(count) as i:
        put(out, token * size + i, number(i))
    fill(out, token * size + count, size - count, T.int32(-1))


class BlockScan:
    """A walk over scored tiles from block `first` on, which offers each block with the score of its best row."""

    def __init__(self, first: Expr, block: int) -> None:
        self._size = block
        self._block = local(first)
        self._highest, self._left = local(T.int32(LOWEST)), local(T.int64(block))

    def offer(self, scores: IndexScores, best: Selection, count: Expr) -> None:
        """Go along the first `count` rows of a tile."""
        best.reserve(scores.tile)
        keys = array(scores.tile, "int32")
        for lane in range(0, scores.tile, LANES):
            put(keys, i64(lane), order_keys(scores.scores[at(lane, LANES)]))
        with loop(count) as place:
            self._highest.set(T.max(self._highest.value, keys[place]))
            self._left.set(self._left.value - 1)
            with when(self._left.value == 0):
                best.push(self._highest.value, cast(self._block.value, "int32"))
                self._block.set(self._block.value + 1)
                self._highest.set(T.int32(LOWEST))
                self._left.set(T.int64(self._size))
