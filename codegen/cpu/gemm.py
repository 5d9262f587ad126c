"""Matrix products with packed weights: a vector at a time for single tokens, register tiles for chunks.

Every output is one chain of fused multiply-adds over ascending k, starting at zero, whatever the variant, the number
of rows or the number of threads; so a token's result does not depend on its company. A vector lane is an output
(`layouts`), and a weight is decoded to the same f32 in every variant: scales are powers of two, so it is exact.

Products of a token (`dot`) read each weight once, straight into multiply-adds, several panels in flight. Products of
a chunk (`Tile`) copy a block of rows and, per stretch of k, decode panels into cache, then run a register tile over
them (Goto and van de Geijn, "Anatomy of high-performance matrix multiplication", 2008).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from v41c.codegen.cpu import layouts, tir
from v41c.codegen.cpu.tir import LANES, Buffer, Expr, Local
from v41c.targets.target import Target

#: TIR dtype of the elements of a packed weight
WORDS = {"f32": "float32", "bf16": "uint16", "f8e4m3": "int32", "f4e2m1": "uint16"}
_GROUP = layouts.SCALE_BLOCK
#: e4m3 decodes to value · 2^-120; the scale restores 2^100 of it and the activation 2^20, so that neither overflows
#: for scales up to 2^27 and activations up to 2^107
_SCALE_SHIFT, _ACTIVATION_SHIFT = 2.0**100, 2.0**20
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

#: f32 of an activation: (row, column, lanes)
Rows = Callable[[Expr, Expr, int], Expr]


@dataclass(frozen=True)
class Weight:
    """A packed matrix [rows, columns], or a stack of them, as a kernel reads it."""

    dtype: str
    rows: int
    columns: int
    data: Buffer
    scale: Buffer | None
    target: Target

    @property
    def panels(self) -> int:
        """Panels of one matrix."""
        return layouts.panels(self.rows)

    @property
    def quantized(self) -> bool:
        """Whether elements come four to a word and are scaled."""
        return self.dtype in ("f8e4m3", "f4e2m1")

    @property
    def activation_factor(self) -> float:
        """What an activation must be multiplied with before it meets decoded weights."""
        return _ACTIVATION_SHIFT if self.dtype == "f8e4m3" else 1.0

    def scales(self, panel: Expr, group: Expr) -> Expr:
        """Factor of 16 outputs over the k of a group of 32, to be given to `columns_of`."""
        place = panel * (self.columns // _GROUP) + group
        if self.dtype == "f8e4m3":
            code = tir.cast(self.scale[place], "int32")
            return tir.splat(tir.decode_e8m0(code) * tir.const(_SCALE_SHIFT), LANES)
        code = tir.cast(self.scale[tir.at(place * LANES, LANES)], "int32")
        # the half-precision decoder leaves value · 2^-14
        restore = 1.0 if self.target.has_avx512 else 2.0**14
        return tir.decode_e8m0(code) * tir.const(restore, LANES)

    def columns_of(self, panel: Expr, index: Expr, scale: Expr | None) -> list[Expr]:
        """16 weights for each k of one word: k = 4 · index … of a quantised weight, k = index otherwise."""
        depth = self.columns // 4 if self.quantized else self.columns
        place = (panel * depth + index) * LANES
        if not self.quantized:
            return [tir.let(tir.load(self.data, place))]
        word = tir.let(self.data[tir.at(place, LANES)])
        if self.dtype == "f8e4m3":
            return [tir.let(tir.decode_e4m3_top(tir.shl(word, 24 - 8 * j)) * scale) for j in range(4)]
        if self.target.has_avx512:
            word = tir.let(tir.cast(word, "int32"))
            return [tir.let(_lookup_e2m1(tir.shr(word, 4 * j)) * scale) for j in range(4)]
        return [tir.let(tir.cast_half(tir.decode_e2m1_top(tir.shl(word, 12 - 4 * j))) * scale) for j in range(4)]


def _lookup_e2m1(code: Expr) -> Expr:
    """f32 of 16 e2m1 codes in the low four bits of int32: one permutation of a table held in a register."""
    values = [*_E2M1, *(-value for value in _E2M1)]
    table = tirx.Shuffle([T.float32(value) for value in values], list(range(16)))
    return T.call_llvm_pure_intrin("float32x16", "llvm.x86.avx512.permvar.sf.512", table, code)


# ---- one token -------------------------------------------------------------------------------------------------------


def dot(parts: Sequence[tuple[Weight, Expr]], x: Buffer, base: Expr) -> list[Local]:
    """Σ_k x[base + k] · weight[panel, k] for several (weight, panel) of one shape at once, 16 outputs each.

    `x` is f32 and already multiplied by the activation factor. Several sums run side by side because one chain
    of multiply-adds is bound by their latency.
    """
    sums = [tir.local(tir.const(0.0, LANES)) for _ in parts]
    weight = parts[0][0]

    def word(index: Expr, k: Expr, scales: Sequence[Expr | None]) -> None:
        columns = [w.columns_of(panel, index, scale) for (w, panel), scale in zip(parts, scales, strict=True)]
        for j in range(len(columns[0])):
            value = tir.let(tir.splat(x[base + k + j], LANES))
            for total, column in zip(sums, columns, strict=True):
                total.set(tir.fma(value, column[j], total.value))

    if weight.quantized:
        with tir.loop(weight.columns // _GROUP) as group:
            scales = [tir.let(w.scales(panel, group)) for w, panel in parts]
            with tir.loop(_GROUP // 4) as quad:
                word(group * (_GROUP // 4) + quad, group * _GROUP + quad * 4, scales)
    else:
        with tir.loop(weight.columns) as k:
            word(k, k, [None] * len(parts))
    return sums


def dot_panels(target: Target, panels: int) -> int:
    """How many panels a task of a single-token product takes: enough to hide latency, few enough to share out."""
    most = 8 if target.vector_registers >= 32 else 4
    wanted = min(most, max(4, -(-panels // 8)))
    return -(-panels // -(-panels // wanted))


def widen_row(source: Rows, row: Expr, columns: int, factor: float) -> Buffer:
    """A row as f32 · factor in scratch memory."""
    x = tir.scratch(columns)

    def body(index: Expr, lanes: int) -> None:
        tir.put(x, index, source(row, index, lanes) * tir.const(factor, lanes))

    tir.each(columns, body)
    return x


# ---- chunks ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tiling:
    """Sizes of a chunk's product: a task computes `task_rows` x `task_panels`, `depth` of k at a time."""

    #: rows of the register tile, and of the tile for the rows that are left
    rows: int
    rest_rows: int
    #: panels of the register tile
    panels: int
    task_rows: int
    task_panels: int
    depth: int


def tiling(target: Target, panels: int, tokens: int, streams: int = 1) -> Tiling:
    """Sizes for a product with so many panels (of each of `streams` matrices) and at most so many rows."""
    wide = target.vector_registers >= 32
    rows, rest_rows, tile_panels = (12, 4, 2) if wide else (6, 3, 1)
    # a block of rows x depth stays in half of the second-level cache beside the sums and the panels
    depth = 256
    task_rows = max(rows, target.l2_bytes // 4 // (depth * 4) // rows * rows)
    task_panels = 8 // streams
    while task_panels > 2 and -(-panels // task_panels) * -(-tokens // task_rows) < 8:
        task_panels //= 2
    while task_rows > 4 * rows and -(-panels // task_panels) * -(-tokens // task_rows) < 8:
        task_rows = max(4 * rows, task_rows // 2 // rows * rows)
    return Tiling(rows, rest_rows, tile_panels, task_rows, task_panels, depth)


class Tile:
    """Products of a block of rows with some panels of one or two weights, inside a parallel task.

    Scratch memory: `sums` [task_rows, task_panels · streams, 16], f32; panel j of stream s is column j · streams + s.
    """

    def __init__(self, sizes: Tiling, weights: Sequence[Weight]) -> None:
        self.sizes = sizes
        self.weights = weights
        self.width = sizes.task_panels * len(weights) * LANES
        # rows a cache line apart modulo the size of a cache way would evict each other
        self._stride = sizes.depth + LANES
        room = -(-sizes.task_rows // sizes.rows) * sizes.rows + sizes.rest_rows
        self.sums = tir.scratch(room * self.width)
        self._rows = tir.scratch(room * self._stride)
        self._panels = tir.scratch(sizes.depth * sizes.panels * LANES)

    def run(self, count: Expr, source: Rows, first_panel: Expr, panels: Expr, stack_panel: Expr) -> None:
        """Fill `sums` for rows 0 … count − 1 of `source` and `panels` panels from `first_panel` on.

        `stack_panel` is the first panel of the matrix in its stack; panels past the matrix repeat its last one.
        """
        weight, sizes = self.weights[0], self.sizes
        columns = weight.columns
        with tir.loop(count * (self.width // LANES)) as i:
            tir.put(self.sums, i * LANES, tir.const(0.0, LANES))
        with tir.loop(-(-columns // sizes.depth)) as chunk:
            start = chunk * sizes.depth
            left = tir.minimum(tir.i64(sizes.depth), tir.i64(columns) - start)
            length = tir.i64(columns) if columns < sizes.depth else left if columns % sizes.depth else sizes.depth
            self._copy_rows(count, source, start, length)
            unit = max(sizes.panels, len(self.weights))
            per_matrix = unit // len(self.weights)
            with tir.loop((panels + (per_matrix - 1)) // per_matrix) as u:
                for first in range(0, unit, sizes.panels):
                    for j in range(sizes.panels):
                        part = self.weights[(first + j) % len(self.weights)]
                        panel = first_panel + u * per_matrix + (first + j) // len(self.weights)
                        inside = tir.minimum(panel, tir.i64(part.panels - 1))
                        self._decode(part, stack_panel + inside, start, length, j)
                    self._multiply(count, (u * unit + first) * LANES, length)

    def _copy_rows(self, count: Expr, source: Rows, start: Expr, length: Expr) -> None:
        factor = self.weights[0].activation_factor
        with tir.loop(count) as row:
            base = row * self._stride

            def copy(index: Expr, lanes: int, row: Expr = row, base: Expr = base) -> None:
                tir.put(self._rows, base + index, source(row, start + index, lanes) * tir.const(factor, lanes))

            _each(length, self.weights[0].columns, copy)

    def _decode(self, weight: Weight, panel: Expr, start: Expr, length: Expr, slot: int) -> None:
        """Panel `slot` of the register tile: [depth, panels of the tile, 16]."""
        step = self.sizes.panels * LANES
        if not weight.quantized:
            with tir.loop(length) as k:
                tir.put(self._panels, k * step + slot * LANES, weight.columns_of(panel, start + k, None)[0])
            return
        with tir.loop(length // _GROUP) as group:
            scale = tir.let(weight.scales(panel, start // _GROUP + group))
            with tir.loop(_GROUP // 4) as quad:
                index = group * (_GROUP // 4) + quad
                for j, column in enumerate(weight.columns_of(panel, start // 4 + index, scale)):
                    tir.put(self._panels, (index * 4 + j) * step + slot * LANES, column)

    def _multiply(self, count: Expr, column: Expr, length: Expr) -> None:
        sizes = self.sizes
        with tir.loop(count // sizes.rows) as block:
            self._register_tile(block * sizes.rows, sizes.rows, column, length)
        done = count // sizes.rows * sizes.rows
        with tir.loop((count - done + (sizes.rest_rows - 1)) // sizes.rest_rows) as block:
            self._register_tile(done + block * sizes.rest_rows, sizes.rest_rows, column, length)

    def _register_tile(self, first_row: Expr, rows: int, column: Expr, length: Expr) -> None:
        width = self.sizes.panels

        def place(row: int, j: int) -> Expr:
            return (first_row + row) * self.width + column + j * LANES

        sums = [[tir.local(tir.load(self.sums, place(r, j))) for j in range(width)] for r in range(rows)]
        with tir.loop(length) as k:
            columns = [tir.let(tir.load(self._panels, k * (width * LANES) + j * LANES)) for j in range(width)]
            for r in range(rows):
                value = tir.let(tir.splat(self._rows[(first_row + r) * self._stride + k], LANES))
                for j in range(width):
                    sums[r][j].set(tir.fma(value, columns[j], sums[r][j].value))
        for r in range(rows):
            for j in range(width):
                tir.put(self.sums, place(r, j), sums[r][j].value)


def _each(length: Expr, columns: int, body: Callable[[Expr, int], None]) -> None:
    """As `tir.each` for a length known at run time; no code for single elements where `columns` needs none."""
    if isinstance(length, int):
        tir.each(length, body)
        return
    with tir.loop(length // LANES) as i:
        body(i * LANES, LANES)
    if columns % LANES:
        with tir.loop(length % LANES) as i:
            body(length // LANES * LANES + i, 1)


def store_panel(out: Buffer, base: Expr, panel: Expr, rows: int, value: Expr) -> None:
    """Store 16 outputs of a panel at out[base + 16 · panel], leaving out those past the matrix."""
    rest = rows % LANES
    if not rest:
        tir.store(out, base + panel * LANES, value)
        return
    value = tir.let(value)
    with tir.when(panel < rows // LANES):
        tir.store(out, base + panel * LANES, value)
    with tir.when(panel == rows // LANES):
        spill = tir.scratch(LANES)
        tir.put(spill, 0, value)
        with tir.loop(rest) as lane:
            tir.store(out, base + panel * LANES + lane, tir.load(spill, lane, 1))
