"""Attention of every patch to all patches of its image.

A task takes 32 patches and one head. Queries stand in the lanes, so that the softmax needs no sums across lanes; keys
and values are widened to f32 in blocks of 64. Every score is one chain over the head width and every output one chain
over the keys, from the first of the image on: a patch's result has the same bits whatever stands beside the image.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tvm.script.ir_builder import tirx as T

from v41c.codegen.cpu.frame import Body, bound_of, build_kernel
from v41c.codegen.cpu.numeric import exp
from v41c.codegen.cpu.sparse import Types, broadcast, required
from v41c.codegen.cpu.tir import (
    LANES,
    Buffer,
    Expr,
    Local,
    bf16,
    cast,
    const,
    each,
    fma,
    i64,
    let,
    load,
    local,
    loop,
    maximum,
    parallel,
    put,
    scratch,
    store,
)
from v41c.codegen.kernel import CpuKernel
from v41c.ir.ops.image_attention import BLOCK, ImageAttention
from v41c.ir.types import DType, TensorType

if TYPE_CHECKING:
    from v41c.targets.target import CpuTarget

_VECTORS = 2  # of queries in a task: each broadcast of a key serves both
_QUERIES = _VECTORS * LANES
_SIDE = 4  # keys, or columns of values, whose sums run side by side


def kernel(
    op: ImageAttention, operands: Types, results: tuple[TensorType, ...], target: CpuTarget, bounds: Mapping[str, int]
) -> CpuKernel:
    """The kernel."""
    (kind,) = required(operands, 0)
    heads, width = int(kind.shape[1]) // 3, int(kind.shape[2])

    def emit(body: Body) -> None:
        patches, bound = let(body.size(kind.shape[0])), bound_of(kind.shape[0], bounds)
        tiles = let((patches + (_QUERIES - 1)) // _QUERIES)
        with parallel(tiles * heads, 2 * bound * bound * heads * width) as task:
            tile = _Tile(body, op, heads, width, let(task // tiles), patches, rounded=kind.dtype == DType.BF16)
            start = local(task % tiles * _QUERIES)
            last = let(T.min(start.value + _QUERIES, patches))
            with T.While(start.value < last):
                start.set(tile.image(let(start.value), last))

    return build_kernel(emit, op, operands, results, bounds)


class _Tile:
    """Scratch of a task: queries, scores and sums [element, 32], keys and values [64, width], all f32."""

    def __init__(
        self, body: Body, op: ImageAttention, heads: int, width: int, head: Expr, patches: Expr, *, rounded: bool
    ) -> None:
        self._qkv, self._begins, self._ends = body.operands
        (self._out,) = body.results
        self._op, self._heads, self._width, self._head, self._patches = op, heads, width, head, patches
        self._rounded = rounded
        self._q, self._sums = scratch(width * _QUERIES), scratch(width * _QUERIES)
        self._keys, self._values = scratch(BLOCK * width), scratch(BLOCK * width)
        self._p, self._state = scratch(BLOCK * _QUERIES), scratch(2 * _QUERIES)

    def image(self, start: Expr, last: Expr) -> Expr:
        """The patches from `start` on that are of its image, before `last`; the first patch after them."""
        begin = let(cast(self._begins[start], "int64"))
        end = let(T.min(cast(self._ends[start], "int64"), self._patches))
        stop = let(T.min(end, last))
        self._load_queries(start, stop)
        with loop((end - begin + (BLOCK - 1)) // BLOCK) as block:
            first = let(begin + block * BLOCK)
            self._absorb(first, let(T.min(end - first, i64(BLOCK))))
        with loop(stop - start) as row, loop(self._width) as i:
            total = self._state[row + _QUERIES]
            place = ((start + row) * self._heads + self._head) * self._width + i
            store(self._out, place, self._sums[i * _QUERIES + row] / total)
        return stop

    def _row(self, patch: Expr, part: int) -> Expr:
        """Where q, k or v (0, 1, 2) of a patch begins."""
        return let(((patch * 3 + part) * self._heads + self._head) * self._width)

    def _load_queries(self, start: Expr, stop: Expr) -> None:
        with loop(_QUERIES) as row:
            source = self._row(let(T.min(start + row, stop - 1)), 0)
            with loop(self._width) as i:
                put(self._q, i * _QUERIES + row, load(self._qkv, source + i, 1))
        each(self._width * _QUERIES, lambda i, lanes: put(self._sums, i, const(0.0, lanes)))
        for vector in range(_VECTORS):
            put(self._state, vector * LANES, const(float("-inf"), LANES))
            put(self._state, _QUERIES + vector * LANES, const(0.0, LANES))

    def _absorb(self, first: Expr, count: Expr) -> None:
        """Take in `count` keys and values, from that of patch `first` on."""
        with loop(count) as key:
            self._widen(let(first + key), 1, self._keys, let(key * self._width))
            self._widen(let(first + key), 2, self._values, let(key * self._width))
        whole = let(count // _SIDE)
        with loop(whole) as quad:
            self._scores(let(quad * _SIDE), _SIDE)
        with loop(count - whole * _SIDE) as rest:
            self._scores(let(whole * _SIDE + rest), 1)
        decays = [self._softmax(vector, count) for vector in range(_VECTORS)]
        with loop(self._width // _SIDE) as quad:
            self._weigh(let(quad * _SIDE), _SIDE, count, decays)
        for i in range(self._width // _SIDE * _SIDE, self._width):
            self._weigh(i64(i), 1, count, decays)

    def _widen(self, patch: Expr, part: int, target: Buffer, place: Expr) -> None:
        source = self._row(patch, part)
        each(self._width, lambda i, lanes: put(target, place + i, load(self._qkv, source + i, lanes)))

    def _scores(self, key: Expr, side: int) -> None:
        sums = [[local(const(0.0, LANES)) for _ in range(_VECTORS)] for _ in range(side)]
        with loop(self._width) as i:
            queries = [let(load(self._q, i * _QUERIES + vector * LANES)) for vector in range(_VECTORS)]
            for j, line in enumerate(sums):
                element = let(broadcast(self._keys, (key + j) * self._width + i))
                for query, total in zip(queries, line, strict=True):
                    total.set(fma(query, element, total.value))
        for j, line in enumerate(sums):
            for vector, total in enumerate(line):
                scaled = total.value * const(self._op.scale, LANES)
                put(self._p, (key + j) * _QUERIES + vector * LANES, scaled)

    def _softmax(self, vector: int, count: Expr) -> Expr:
        """Scores of a vector of queries to weights; what their sums so far must be multiplied with."""
        place = vector * LANES
        old = let(load(self._state, place))
        highest = local(old)
        with loop(count) as key:
            highest.set(maximum(highest.value, let(load(self._p, key * _QUERIES + place))))
        new = let(highest.value)
        decay = let(exp(old - new))
        total: Local = local(load(self._state, _QUERIES + place) * decay)
        with loop(count) as key:
            weight = let(exp(load(self._p, key * _QUERIES + place) - new))
            total.set(total.value + weight)
            put(self._p, key * _QUERIES + place, bf16(weight) if self._rounded else weight)
        put(self._state, place, new)
        put(self._state, _QUERIES + place, total.value)
        return decay

    def _weigh(self, column: Expr, side: int, count: Expr, decays: list[Expr]) -> None:
        places = [[(column + j) * _QUERIES + vector * LANES for vector in range(_VECTORS)] for j in range(side)]
        sums = [
            [local(load(self._sums, place) * decay) for place, decay in zip(line, decays, strict=True)]
            for line in places
        ]
        with loop(count) as key:
            weights = [let(load(self._p, key * _QUERIES + vector * LANES)) for vector in range(_VECTORS)]
            for j, line in enumerate(sums):
                element = let(broadcast(self._values, key * self._width + column + j))
                for weight, total in zip(weights, line, strict=True):
                    total.set(fma(weight, element, total.value))
        for line, totals in zip(places, sums, strict=True):
            for place, total in zip(line, totals, strict=True):
                put(self._sums, place, total.value)
