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
class Panel:
    """Where a panel lies in a packed weight: its vector `index` along k is number data + index · step, scales alike."""

    data: Expr
    step: Expr
    scale: Expr
    scale_step: Expr


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
    def strip(self) -> int:
        """Panels that lie side by side."""
        return strip_panels(self.target, self.panels, self.quantized)

    @property
    def strips(self) -> int:
        """Strips of one matrix."""
        return -(-self.panels // self.strip)

    @property
    def quantized(self) -> bool:
        """Whether elements come four to a word and are scaled."""
        return self.dtype in ("f8e4m3", "f4e2m1")

    @property
    def depth(self) -> int:
        """Vectors of one panel."""
        return self.columns // 4 if self.quantized else self.columns

    @property
    def activation_factor(self) -> float:
        """What an activation must be multiplied with before it meets decoded weights."""
        return _ACTIVATION_SHIFT if self.dtype == "f8e4m3" else 1.0

    @property
    def scale_panels(self) -> int:
        """Panels of one matrix that have scales: blocks of 32 rows give an even number."""
        return 2 * -(-self.rows // _GROUP) if self.dtype == "f8e4m3" else self.panels

    def strip_of(self, matrix: Expr, strip: Expr, width: int) -> list[Panel]:
        """The `width` panels of a strip of a matrix of the stack."""
        data = tir.let((matrix * self.panels + strip * self.strip) * self.depth)
        scale = tir.let((matrix * self.scale_panels + strip * self.strip) * (self.columns // _GROUP))
        # only the last strip is narrower; its scales may have one panel more
        last = self.scale_panels - self.panels // self.strip * self.strip
        scale_width = width if width == self.strip else min(self.strip, last)
        return [Panel(data + j, width, scale + j, scale_width) for j in range(width)]

    def panel_of(self, matrix: Expr, panel: Expr) -> Panel:
        """Any panel of a matrix of the stack."""
        strip = tir.let(panel // self.strip)
        first = tir.let(strip * self.strip)
        lane = tir.let(panel - first)

        def width(panels: int) -> Expr:
            rest = panels % self.strip
            return self.strip if not rest else tir.let(tir.minimum(tir.i64(self.strip), tir.i64(panels) - first))

        data = (matrix * self.panels + first) * self.depth + lane
        scale = (matrix * self.scale_panels + first) * (self.columns // _GROUP) + lane
        return Panel(tir.let(data), width(self.panels), tir.let(scale), width(self.scale_panels))

    def scales(self, panel: Panel, group: Expr) -> Expr:
        """Factor of 16 outputs over the k of a group of 32, to be given to `columns_of`."""
        place = panel.scale + group * panel.scale_step
        if self.dtype == "f8e4m3":
            code = tir.cast(self.scale[place], "int32")
            return tir.splat(tir.let(tir.decode_e8m0(code) * tir.const(_SCALE_SHIFT)), LANES)
        code = tir.cast(self.scale[tir.at(place * LANES, LANES)], "int32")
        # the half-precision decoder leaves value · 2^-14
        restore = 1.0 if self.target.has_avx512 else 2.0**14
        return tir.decode_e8m0(code) * tir.const(restore, LANES)

    def columns_of(self, panel: Panel, index: Expr, scale: Expr | None) -> list[Expr]:
        """16 weights for each k of one word: k = 4 · index … of a quantised weight, k = index otherwise."""
        place = (panel.data + index * panel.step) * LANES
        if not self.quantized:
            return [tir.let(tir.load(self.data, place))]
        word = tir.let(self.data[tir.at(place, LANES)])
        if self.dtype == "f8e4m3":
            return [tir.decode_e4m3_top(tir.shl(word, 24 - 8 * j)) * scale for j in range(4)]
        if self.target.has_avx512:
            word = tir.let(tir.cast(word, "int32"))
            return [_lookup_e2m1(tir.shr(word, 4 * j)) * scale for j in range(4)]
        return [tir.cast_half(tir.decode_e2m1_top(tir.shl(word, 12 - 4 * j))) * scale for j in range(4)]


def strip_panels(target: Target, panels: int, quantized: bool) -> int:
    """Panels of a strip, which is what a task of a single-token product takes.

    Enough to hide the latency of multiply-adds, few enough to keep sums, words and scales in registers and to share
    the strips out among threads.
    """
    # of narrow registers, a panel takes two for sums and, if quantised, two for words and up to two for scales
    most = (2 if quantized else 4) if target.vector_registers < 32 else 8
    wanted = min(most, max(4, -(-panels // 8)))
    even = -(-panels // -(-panels // wanted))
    # whole groups of 32 outputs, which share a scale when they become the next product's input
    return even + even % 2 if panels > 1 else 1


def _lookup_e2m1(code: Expr) -> Expr:
    """f32 of 16 e2m1 codes in the low four bits of int32: one permutation of a table held in a register."""
    values = [*_E2M1, *(-value for value in _E2M1)]
    table = tirx.Shuffle([T.float32(value) for value in values], list(range(16)))
    return T.call_llvm_pure_intrin("float32x16", "llvm.x86.avx512.permvar.sf.512", table, code)


# ---- one token -------------------------------------------------------------------------------------------------------


def dot(weight: Weight, panels: Sequence[Panel], x: Buffer) -> list[Local]:
    """Σ_k x[k] · weight[panel, k] for the panels of a strip at once, 16 outputs each.

    `x` is f32 and already multiplied by the activation factor. Several sums run side by side because one chain of
    multiply-adds is bound by their latency.
    """
    sums = [tir.local(tir.const(0.0, LANES)) for _ in panels]

    def word(index: Expr, k: Expr, scales: Sequence[Expr | None]) -> None:
        for total, panel, scale in zip(sums, panels, scales, strict=True):
            for j, column in enumerate(weight.columns_of(panel, index, scale)):
                total.set(tir.fma(tir.splat(x[k + j], LANES), column, total.value))

    if weight.quantized:
        with tir.loop(weight.columns // _GROUP) as group:
            scales = [tir.let(weight.scales(panel, group)) for panel in panels]
            with tir.loop(_GROUP // 4) as quad:
                word(tir.let(group * (_GROUP // 4) + quad), tir.let(group * _GROUP + quad * 4), scales)
    else:
        with tir.loop(weight.columns) as k:
            word(k, k, [None] * len(panels))
    return sums


def at_strip(weight: Weight, strip: Expr, body: Callable[[int], None]) -> None:
    """`body(width)` for the strip of this number, whose width is known when the code is made."""
    whole, rest = divmod(weight.panels, weight.strip)
    if not rest:
        body(weight.strip)
        return
    with tir.when(strip < whole):
        body(weight.strip)
    with tir.when(strip == whole):
        body(rest)


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


def tiling(target: Target, panels: int, tokens: int, streams: int = 1, all_panels: bool = False) -> Tiling:
    """Sizes for a product with so many panels of each of `streams` matrices and at most so many rows.

    `all_panels` gives a task every panel of its rows.
    """
    wide = target.vector_registers >= 32
    rows, rest_rows, tile_panels = (12, 4, 2) if wide else (6, 3, 1)
    # a block of rows x depth stays in half of the second-level cache beside the sums and the panels
    depth = 256
    task_rows = max(rows, target.l2_bytes // 4 // (depth * 4) // rows * rows)
    task_panels = -(-panels // tile_panels) * tile_panels if all_panels else 8 // streams

    def tasks() -> int:
        return -(-panels // task_panels) * -(-tokens // task_rows)

    # enough tasks for the threads, first from narrower, then from shorter blocks
    while not all_panels and task_panels > 2 and tasks() < 8:
        task_panels //= 2
    while task_rows > 4 * rows and tasks() < 8:
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

    def run(self, count: Expr, source: Rows, matrix: Expr, first_panel: Expr, panels: Expr) -> None:
        """Fill `sums` for rows 0 … count − 1 of `source` and `panels` panels of a matrix from `first_panel` on.

        Panels past the matrix, which complete a register tile, repeat its last one.
        """
        sizes, columns, streams = self.sizes, self.weights[0].columns, len(self.weights)
        with tir.loop(count * (self.width // LANES)) as i:
            tir.put(self.sums, i * LANES, tir.const(0.0, LANES))
        with tir.loop(-(-columns // sizes.depth)) as chunk:
            start = tir.let(chunk * sizes.depth)
            length: Expr = min(columns, sizes.depth)
            if columns % length:
                length = tir.let(tir.minimum(tir.i64(length), tir.i64(columns) - start))
            self._copy_rows(count, source, start, length)
            unit = max(sizes.panels, streams)
            with tir.loop((panels + (unit // streams - 1)) // (unit // streams)) as u:
                for first in range(0, unit, sizes.panels):
                    for j in range(sizes.panels):
                        weight = self.weights[(first + j) % streams]
                        panel = tir.let(first_panel + u * (unit // streams) + (first + j) // streams)
                        inside = tir.let(tir.minimum(panel, tir.i64(weight.panels - 1)))
                        self._decode(weight, weight.panel_of(matrix, inside), start, length, j)
                    self._multiply(count, tir.let((u * unit + first) * LANES), length)

    def _copy_rows(self, count: Expr, source: Rows, start: Expr, length: Expr) -> None:
        factor = self.weights[0].activation_factor
        with tir.loop(count) as row:
            base = row * self._stride

            def copy(index: Expr, lanes: int, row: Expr = row, base: Expr = base) -> None:
                tir.put(self._rows, base + index, source(row, start + index, lanes) * tir.const(factor, lanes))

            _each(length, self.weights[0].columns, copy)

    def _decode(self, weight: Weight, panel: Panel, start: Expr, length: Expr, slot: int) -> None:
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
        whole = tir.let(count // sizes.rows)
        with tir.loop(whole) as block:
            self._register_tile(block * sizes.rows, sizes.rows, column, length)
        done = tir.let(whole * sizes.rows)
        with tir.loop((count - done + (sizes.rest_rows - 1)) // sizes.rest_rows) as block:
            self._register_tile(done + block * sizes.rest_rows, sizes.rest_rows, column, length)

    def _register_tile(self, first_row: Expr, rows: int, column: Expr, length: Expr) -> None:
        width = self.sizes.panels
        row = tir.let(first_row)
        base, corner = tir.let(row * self._stride), tir.let(row * self.width + column)
        places = [[corner + (r * self.width + j * LANES) for j in range(width)] for r in range(rows)]
        sums = [[tir.local(tir.load(self.sums, place)) for place in line] for line in places]
        with tir.loop(length) as k:
            columns = [tir.let(tir.load(self._panels, k * (width * LANES) + j * LANES)) for j in range(width)]
            for r in range(rows):
                value = tir.let(tir.splat(self._rows[base + k + r * self._stride], LANES))
                for j in range(width):
                    sums[r][j].set(tir.fma(value, columns[j], sums[r][j].value))
        for line, totals in zip(places, sums, strict=True):
            for place, total in zip(line, totals, strict=True):
                tir.put(self.sums, place, total.value)


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
    _put_panel(base, panel, rows, value, lambda index, part: tir.store(out, index, part))


def add_panel(out: Buffer, base: Expr, panel: Expr, rows: int, value: Expr) -> None:
    """Add 16 outputs of a panel to f32 out[base + 16 · panel], leaving out those past the matrix."""

    def add(index: Expr, part: Expr) -> None:
        tir.store(out, index, tir.load(out, index, tir.lanes_of(part)) + part)

    _put_panel(base, panel, rows, value, add)


def _put_panel(base: Expr, panel: Expr, rows: int, value: Expr, put: Callable[[Expr, Expr], None]) -> None:
    start, value = tir.let(base + panel * LANES), tir.let(value)
    rest = rows % LANES
    if not rest:
        put(start, value)
        return
    with tir.when(panel < rows // LANES):
        put(start, value)
    with tir.when(panel == rows // LANES):
        spill = tir.scratch(LANES)
        tir.put(spill, 0, value)
        with tir.loop(rest) as lane:
            put(start + lane, tir.load(spill, lane, 1))
