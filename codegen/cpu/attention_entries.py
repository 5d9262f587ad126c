"""The entries that a token attends to, in order: ring rows, rows of the step, selected compressed rows."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from tvm.script.ir_builder import tirx as T

from v41c.codegen.cpu import e2m1
from v41c.codegen.cpu.frame import Body
from v41c.codegen.cpu.numeric import decode_e4m3, decode_e8m0
from v41c.codegen.cpu.sparse import Types, prefetch, required
from v41c.codegen.cpu.tir import (
    LANES,
    Buffer,
    Expr,
    at,
    cast,
    i64,
    integers,
    let,
    load,
    local,
    loop,
    put,
    shuffle,
    when,
)
from v41c.ir import formats
from v41c.ir.ops.attention import Attention
from v41c.ir.types import DType

if TYPE_CHECKING:
    from v41c.targets.target import CpuTarget


AHEAD = 8  # entries between the prefetch of a selected row and its use: they lie scattered over the cache


class Entries:
    """Entries of one token; `choose` must come before `count` and `read`."""

    #: f32 memory in which some of the entries lie, `stride` elements apart, and need no copy
    direct: Buffer = None
    stride = 0

    def __init__(self, body: Body, op: Attention, types: Types, token: Expr, target: CpuTarget) -> None:
        q, window = required(types, 0, 3)
        self._body, self._types, self._target = body, types, target
        self._width, self._length = int(q.shape[2]), int(window.shape[1])
        positions, slots, starts, first = body.operands[4:8]
        self._token = token
        self._slot = let(cast(slots[token], "int64"))
        start = let(cast(starts[token], "int64"))
        position = let(cast(positions[token], "int64"))
        begin = let(cast(positions[start], "int64"))
        newest = position if op.causal else let(begin - 1)
        oldest = T.max(newest - (self._length - 1), cast(first[token], "int64"))
        self._lowest = let(T.max(oldest, i64(0)))
        inside = let(T.max(newest - self._lowest + 1, i64(0)))
        self._ring = let(T.min(T.max(begin - self._lowest, i64(0)), inside))
        if op.causal:
            self._first_row = let(start + T.max(self._lowest - begin, i64(0)))
            self._window = inside
        else:
            self._first_row = start
            end = local(token + 1)
            tokens = body.size(q.shape[0])
            with T.While(self._same_run(starts, start, end.value, tokens)):
                end.set(end.value + 1)
            self._window = let(self._ring + end.value - start)
        self.count = local(self._window)
        self._chosen: Expr = None

    @staticmethod
    def _same_run(starts: Buffer, start: Expr, row: Expr, tokens: Expr) -> Expr:
        inside = row < tokens
        return T.if_then_else(inside, cast(starts[T.min(row, tokens - 1)], "int64") == start, inside)

    def choose(self, memory: Expr) -> None:
        """Copy the selected rows without the gaps to `memory`, an index of the integer scratch."""
        selection = self._body.operands[9]
        if selection is None:
            return
        (kind,) = required(self._types, 9)
        width = int(kind.shape[1])
        self._chosen = let(memory)
        kept = local(T.int64(0))
        with loop(width) as i:
            row = let(selection[self._token * width + i])
            put(self._body.integers, self._chosen + kept.value, row)
            kept.set(kept.value + cast(row >= 0, "int64"))
        self.count.set(self._window + kept.value)

    def unless_direct(self, entry: Expr) -> AbstractContextManager[None]:
        """Whether an entry must be read into the scratch."""
        return nullcontext()

    def is_direct(self, entry: Expr) -> Expr:
        """Whether the block that an entry is in lies in `direct` as a whole."""
        raise NotImplementedError

    def place_of(self, entry: Expr) -> Expr:
        """Index of an entry's row in `direct`."""
        raise NotImplementedError

    def read(self, entry: Expr, target: Expr) -> None:
        """Write an entry as f32 to an index of the scratch."""
        window, compressed = self._body.operands[3], self._body.operands[8]
        entry, target = let(entry), let(target)
        with when(entry < self._ring):
            row = let(self._slot * self._length + (self._lowest + entry) % self._length)
            self._read_row(window, row, "fp8_e8m0_32", 3, target)
        with when(T.And(entry >= self._ring, entry < self._window)):
            self._copy(self._body.operands[1], (self._first_row + entry - self._ring) * self._width, target)
        if compressed is not None:
            with when(entry >= self._window):
                self._read_selected(entry, target)

    def _read_selected(self, entry: Expr, target: Expr) -> None:
        """Write an entry behind the window's as f32 to an index of the scratch."""
        compressed, (kind,) = self._body.operands[8], required(self._types, 8)
        first = let(self._slot * self._body.size(kind.shape[1]))
        ahead = self._chosen_row(T.min(entry + AHEAD, self.count.value - 1))
        prefetch(compressed, (first + ahead) * int(kind.shape[2]), int(kind.shape[2]))
        self._read_row(compressed, let(first + self._chosen_row(entry)), "fp4_e4m3_16", 8, target)

    def _chosen_row(self, entry: Expr) -> Expr:
        return cast(self._body.integers[self._chosen + entry - self._window], "int64")

    def _read_row(self, cache: Buffer, row: Expr, name: str, operand: int, target: Expr) -> None:
        (kind,) = required(self._types, operand)
        if kind.dtype != DType.U8:
            self._copy(cache, row * self._width, target)
            return
        start = let(row * formats.FORMATS[name].row_bytes(self._width))
        if name == "fp8_e8m0_32":
            self._unpack_fp8(cache, start, target)
        else:
            self._unpack_fp4(cache, start, target)

    def _copy(self, source: Buffer, start: Expr, target: Expr) -> None:
        start = let(start)
        with loop(self._width // LANES) as i:
            put(self._body.words, target + i * LANES, load(source, start + i * LANES))

    def _unpack_fp8(self, cache: Buffer, start: Expr, target: Expr) -> None:
        with loop(self._width // 32) as group:
            code = cast(cache[start + self._width + group], "int32")
            scale = let(T.broadcast(decode_e8m0(code), LANES))
            for part in range(0, 32, LANES):
                codes = cast(cache[at(start + group * 32 + part, LANES)], "int32")
                put(self._body.words, target + group * 32 + part, decode_e4m3(codes) * scale)

    def _unpack_fp4(self, cache: Buffer, start: Expr, target: Expr) -> None:
        def write(index: Expr, values: Expr) -> None:
            put(self._body.words, target + index, values)

        unpack_fp4(cache, start, self._width, self._target, write)


def unpack_fp4(cache: Buffer, start: Expr, width: int, target: CpuTarget, write: Callable[[Expr, Expr], None]) -> None:
    """`write(index, values)` of every sixteen elements of the packed row (`fp4_e4m3_16`) that begins at `start`."""
    with loop(width // 16) as group:
        code = cast(cache[start + width // 2 + group], "int32")
        scale = let(T.broadcast(decode_e4m3(code), LANES))
        packed = let(cache[at(start + group * 8, 8)])
        pairs = cast(shuffle([packed], [lane // 2 for lane in range(LANES)]), "int32")
        codes = T.shift_right(pairs, integers([4 * (lane % 2) for lane in range(LANES)]))
        write(group * 16, e2m1.decode(codes, target) * scale)
