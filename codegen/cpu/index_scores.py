"""Scores of compressed rows for one query of the indexer, a tile of rows at a time.

Σ_h relu(q_h · key) · w_h with rows in the lanes: the products of a row are summed in the same order wherever it stands
in a tile, so a score has the same bits in every schedule.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm.script.ir_builder import tirx as T

from v41c.codegen.cpu import e2m1
from v41c.codegen.cpu.frame import Body
from v41c.codegen.cpu.numeric import (
    decode_e8m0,
)
from v41c.codegen.cpu.sparse import (
    Types,
    array,
    broadcast,
    fill,
    prefetch,
    registers,
    required,
    round_up,
    transpose_words,
)
from v41c.codegen.cpu.tir import (
    LANES,
    Expr,
    at,
    bf16,
    cast,
    const,
    fma,
    from_bits,
    i64,
    let,
    load,
    loop,
    maximum,
    put,
    shr,
)
from v41c.ir.types import DType, TensorType

if TYPE_CHECKING:
    from v41c.targets.target import CpuTarget

GROUP = 32  # key elements that share a scale


class IndexScores:
    """Scoring in `words(…)` words of scratch at `base`.

    `prepare` reads a query; then `set_row` names the rows of a tile and `score` leaves their scores in `scores`.
    """

    def __init__(self, body: Body, types: Types, scale: float, base: Expr, target: CpuTarget) -> None:
        q, weights, keys = required(types, 0, 1, 2)
        self._body = body
        self._rounded_weights = weights.dtype == DType.BF16
        self._packed = keys.dtype == DType.U8
        self._target = target
        self._scale = scale
        self._heads, self._width = int(q.shape[1]), int(q.shape[2])
        self._row_items = int(keys.shape[2])
        self._capacity = body.size(keys.shape[1])
        self.tile, self._step, self._padded = _shape(q, target)
        self._q = base
        self._w = base + self._padded * self._width
        self._keys = self._w + round_up(self._padded)
        self._rows = self._keys + self._width * self.tile
        self.scores = array(self.tile)

    @staticmethod
    def words(types: Types, target: CpuTarget) -> int:
        """Words of scratch of one task."""
        (q,) = required(types, 0)
        tile, _, padded = _shape(q, target)
        return padded * int(q.shape[2]) + round_up(padded) + int(q.shape[2]) * tile + tile

    def prepare(self, token: Expr) -> None:
        """Read the query and the weights of a token; heads that only fill up the last step weigh zero."""
        q, weights = self._body.operands[:2]
        words, size, padding = self._body.words, self._heads * self._width, self._padded - self._heads
        with loop(size // LANES) as i:
            put(words, self._q + i * LANES, load(q, token * size + i * LANES))
        fill(words, self._q + size, padding * self._width, T.float32(0.0))
        with loop(self._heads) as h:
            weight = load(weights, token * self._heads + h, 1) * T.float32(self._scale)
            put(words, self._w + h, bf16(weight) if self._rounded_weights else weight)
        fill(words, self._w + self._heads, padding, T.float32(0.0))

    def set_row(self, place: Expr, row: Expr) -> None:
        """Name the row at one place of the tile."""
        put(self._body.integers, self._rows + place, cast(row, "int32"))

    def set_rows(self, first: Expr, last: Expr) -> None:
        """Name consecutive rows; places beyond `last` repeat it."""
        for part in range(0, self.tile, LANES):
            rows = T.broadcast(cast(first, "int32"), LANES) + T.ramp(T.int32(part), T.int32(1), LANES)
            put(self._body.integers, self._rows + part, T.min(rows, T.broadcast(cast(last, "int32"), LANES)))

    def row(self, place: Expr) -> Expr:
        """int32 row number at a place of the tile."""
        return self._body.integers[self._rows + place]

    def expect(self, slot: Expr, row: Expr, rows: int) -> None:
        """Ask for consecutive rows that are scored soon, at most for the first KiB."""
        items = min(rows * self._row_items, 1024 // (1 if self._packed else 4))
        prefetch(self._body.operands[2], (slot * self._capacity + row) * self._row_items, items)

    def score(self, slot: Expr) -> None:
        """Scores of the tile's rows of a sequence."""
        self._read_keys(slot)
        words, step, parts = self._body.words, self._step, self.tile // LANES
        scores = registers(parts)
        with loop(self._padded // step) as group:
            acc = [registers(parts) for _ in range(step)]
            first = let(self._q + group * (step * self._width))
            with loop(self._width) as d:
                keys = [let(words[at(self._keys + d * self.tile + part * LANES, LANES)]) for part in range(parts)]
                for h in range(step):
                    value = let(broadcast(words, first + d + h * self._width))
                    for key, total in zip(keys, acc[h], strict=True):
                        total.set(fma(value, key, total.value))
            for h in range(step):
                weight = let(broadcast(words, self._w + group * step + h))
                for total, score in zip(acc[h], scores, strict=True):
                    score.set(fma(maximum(total.value, const(0.0, LANES)), weight, score.value))
        for part, score in enumerate(scores):
            put(self.scores, i64(part * LANES), score.value)

    def _read_keys(self, slot: Expr) -> None:
        first = let(slot * self._capacity)
        with loop(self.tile // LANES) as part:
            place = let(part * LANES)
            starts = [let((first + cast(self.row(place + lane), "int64")) * self._row_items) for lane in range(LANES)]
            if self._packed:
                self._unpack_keys(starts, place)
            else:
                self._copy_keys(starts, place)

    def _unpack_keys(self, starts: list[Expr], place: Expr) -> None:
        keys = self._body.operands[2]
        with loop(self._width // GROUP) as group:
            codes = array(LANES, "int32")
            for lane, start in enumerate(starts):
                put(codes, i64(lane), cast(keys[start + self._width // 2 + group], "int32"))
            rows = [let(T.reinterpret("int32x4", keys[at(start + group * (GROUP // 2), 16)])) for start in starts]
            scale = let(decode_e8m0(codes[at(0, LANES)]))
            for word, vector in enumerate(transpose_words(rows)):
                for nibble in range(8):
                    value = e2m1.decode(shr(vector, 4 * nibble), self._target) * scale
                    self._put_key(group * GROUP + (8 * word + nibble), place, value)

    def _copy_keys(self, starts: list[Expr], place: Expr) -> None:
        keys = self._body.operands[2]
        with loop(self._width // 4) as quad:
            rows = [let(T.reinterpret("int32x4", keys[at(start + quad * 4, 4)])) for start in starts]
            for word, vector in enumerate(transpose_words(rows)):
                self._put_key(quad * 4 + word, place, from_bits(vector))

    def _put_key(self, element: Expr, place: Expr, value: Expr) -> None:
        put(self._body.words, self._keys + element * self.tile + place, value)


def _shape(q: TensorType, target: CpuTarget) -> tuple[int, int, int]:
    """Rows of a tile, heads scored together, heads padded to whole steps.

    Tile times heads are as many accumulators as hide the latency of a multiply-add, and as the registers hold.
    """
    tile, step = (2 * LANES, 8) if target.has_avx512 else (LANES, 4)
    return tile, step, round_up(int(q.shape[1]), step)
