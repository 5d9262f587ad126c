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
from functools import partial

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from v41c.codegen.cpu import layouts, tir
from v41c.codegen.cpu.tir import LANES, Buffer, Expr, Local
from v41c.targets.target import Target

#: TIR dtype of the elements of a packed weight
WORDS = {"f32": "float32", "bf16": "uint16", "f8e4m3": "int32", "f4e2m1": "uint16"}
_GROUP = layouts.SCALE_BLOCK
#: e4m3 decodes to value · 2^-120. Half of that comes back with the scale and half with the result, so that neither
#: scaled activations nor weights leave the normal range for scales 2^-57 … 2^67 and activations below 2^60
_HALF_SHIFT = 2.0**60
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
    #: None without a scale
    scale: Buffer
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
    def restore(self) -> float:
        """What a sum of products with decoded weights must be multiplied with."""
        return _HALF_SHIFT if self.dtype == "f8e4m3" else 1.0

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

    def scales(self, panel: Panel, group: Expr) -> Expr:
        """Factor of 16 outputs over the k of a group of 32, to be given to `columns_of`."""
        place = panel.scale + group * panel.scale_step
        if self.dtype == "f8e4m3":
            code = tir.cast(self.scale[place], "int32")
            return tir.splat(tir.let(tir.decode_e8m0(code) * tir.const(_HALF_SHIFT)), LANES)
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
            return [value * scale for value in _decode_e4m3(word)]
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


def _decode_e4m3(word: Expr) -> list[Expr]:
    """value · 2^-120 of the four e4m3 in each int32."""
    return [tir.decode_e4m3_top(tir.shl(word, 24 - 8 * j)) for j in range(4)]


def _lookup_e2m1(code: Expr) -> Expr:
    """f32 of 16 e2m1 codes in the low four bits of int32: one permutation of a table held in a register."""
    values = [*_E2M1, *(-value for value in _E2M1)]
    table = tirx.Shuffle([T.float32(value) for value in values], list(range(16)))
    return T.call_llvm_pure_intrin("float32x16", "llvm.x86.avx512.permvar.sf.512", table, code)


# ---- one token -------------------------------------------------------------------------------------------------------


def dot(weight: Weight, panels: Sequence[Panel], x: Buffer) -> list[Expr]:
    """Σ_k x[k] · weight[panel, k], x in f32, for the panels of a strip at once, 16 outputs each.

    Several sums run side by side because one chain of multiply-adds is bound by their latency.
    """
    sums = [tir.local(tir.const(0.0, LANES)) for _ in panels]
    if weight.dtype == "f8e4m3" and len(panels) == 2:
        _dot_block(weight, panels, x, sums)
    elif weight.quantized:
        with tir.loop(weight.columns // _GROUP) as group:
            scales = [tir.let(weight.scales(panel, group)) for panel in panels]
            with tir.loop(_GROUP // 4) as quad:
                k = tir.let(group * _GROUP + quad * 4)
                for total, panel, scale in zip(sums, panels, scales, strict=True):
                    for j, column in enumerate(weight.columns_of(panel, k // 4, scale)):
                        total.set(tir.fma(tir.splat(x[k + j], LANES), column, total.value))
    else:
        with tir.loop(weight.columns) as k:
            for total, panel in zip(sums, panels, strict=True):
                (column,) = weight.columns_of(panel, k, None)
                total.set(tir.fma(tir.splat(x[k], LANES), column, total.value))
    return [tir.let(total.value * tir.const(weight.restore, LANES)) for total in sums]


def _dot_block(weight: Weight, panels: Sequence[Panel], x: Buffer, sums: Sequence[Local]) -> None:
    """A strip of two panels is a block of 32 rows with one scale per group: it goes to x, exactly as to the weights."""
    scaled = tir.scratch(_GROUP)
    with tir.loop(weight.columns // _GROUP) as group:
        scale = tir.let(weight.scales(panels[0], group))
        for part in range(0, _GROUP, LANES):
            tir.put(scaled, part, tir.load(x, group * _GROUP + part) * scale)
        with tir.loop(_GROUP // 4) as quad:
            for total, panel in zip(sums, panels, strict=True):
                word = weight.data[tir.at((panel.data + (group * (_GROUP // 4) + quad) * panel.step) * LANES, LANES)]
                for j, value in enumerate(_decode_e4m3(tir.let(word))):
                    total.set(tir.fma(tir.splat(scaled[quad * 4 + j], LANES), value, total.value))


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


def widen_row(source: Rows, row: Expr, columns: int) -> Buffer:
    """A row as f32 in scratch memory."""
    x = tir.scratch(columns)

    def body(index: Expr, lanes: int) -> None:
        tir.put(x, index, source(row, index, lanes))

    tir.each(columns, body)
    return x


# ---- chunks ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tiling:
    """Sizes of a chunk's product: a task computes `task_rows` x `task_strips`, `depth` of k at a time."""

    #: rows of the register tile, and of the tile for the rows that are left
    rows: int
    rest_rows: int
    #: panels of the register tile
    panels: int
    task_rows: int
    task_strips: int
    depth: int


def tiling(weight: Weight, tokens: int, matrices: int = 1, streams: int = 1, all_strips: bool = False) -> Tiling:
    """Sizes for products with `matrices` matrices like `weight`, `streams` at a time, with at most so many rows.

    `all_strips` gives a task every output of its rows.
    """
    wide = weight.target.vector_registers >= 32
    rows, rest_rows, tile_panels = (12, 4, 2) if wide else (6, 3, 1)
    # a block of rows x depth takes a quarter of the second-level cache, beside the sums and the decoded strips
    depth = 256
    task_rows = max(rows, weight.target.l2_bytes // 4 // (depth * 4) // rows * rows)
    task_strips = weight.strips if all_strips else max(1, 8 // (weight.strip * streams))

    def tasks() -> int:
        return matrices * -(-weight.strips // task_strips) * -(-tokens // task_rows)

    # enough tasks for the threads, first from narrower, then from shorter blocks
    while not all_strips and task_strips > 1 and tasks() < 8:
        task_strips //= 2
    while task_rows > 4 * rows and tasks() < 8:
        task_rows = max(4 * rows, task_rows // 2 // rows * rows)
    return Tiling(rows, rest_rows, tile_panels, task_rows, task_strips, depth)


class Tile:
    """Products of a block of rows with some strips of one or two weights, inside a parallel task.

    Scratch memory: `sums` [rows, task panels · streams, 16], f32; panel j of stream s is column j · streams + s. Read
    them by `value`.
    """

    #: rows that are multiplied straight from the packed weight, and how many such blocks before tiles pay
    FEW_ROWS, FEW_BLOCKS = 4, 2

    def __init__(self, sizes: Tiling, weights: Sequence[Weight]) -> None:
        self.sizes, self.weights, self.streams = sizes, weights, len(weights)
        weight = weights[0]
        self.panels = sizes.task_strips * weight.strip
        self.width = -(-self.panels * self.streams // sizes.panels) * sizes.panels * LANES
        # rows a multiple of a cache way apart would evict each other
        self._stride, self._long_stride = sizes.depth + LANES, weight.columns + LANES
        room = -(-sizes.task_rows // sizes.rows) * sizes.rows + sizes.rest_rows
        few = self.FEW_ROWS * self.FEW_BLOCKS
        self.sums = tir.scratch(max(room, few) * self.width)
        self._rows = tir.scratch(max(room * self._stride, few * self._long_stride))
        units = -(-weight.strip * self.streams // sizes.panels)
        self._decoded = tir.scratch(units * sizes.panels * sizes.depth * LANES)

    def run(self, count: Expr, source: Rows, matrix: Expr, first: Expr, strips: Expr) -> None:
        """Fill `sums` for rows 0 … count − 1 of `source` and `strips` strips of a matrix from strip `first` on."""
        few = self.FEW_ROWS * self.FEW_BLOCKS
        kind = tir.let(tir.select(count <= few, tir.i64(0), tir.i64(1)))
        with tir.loop(tir.maximum(tir.i64(count), tir.i64(few)) * (self.width // LANES)) as i:
            tir.put(self.sums, i * LANES, tir.const(0.0, LANES))
        with tir.when(kind == 0):
            self._run_few(count, source, matrix, first, strips)
        with tir.when(kind == 1):
            self._run_many(count, source, matrix, first, strips)

    def value(self, row: Expr, column: Expr) -> Expr:
        """The 16 outputs of a row at a column of `sums`."""
        total = tir.load(self.sums, row * self.width + column * LANES)
        return total * tir.const(self.weights[0].restore, LANES)

    # -- a few rows: weights are decoded in registers, once for FEW_ROWS rows

    def _run_few(self, count: Expr, source: Rows, matrix: Expr, first: Expr, strips: Expr) -> None:
        self._copy_rows(count, source, tir.i64(0), self.weights[0].columns, self._long_stride)
        blocks = tir.let((count + (self.FEW_ROWS - 1)) // self.FEW_ROWS)
        with tir.loop(strips) as s:
            for stream, weight in enumerate(self.weights):
                strip, column = tir.let(first + s), tir.let((s * weight.strip * self.streams + stream) * LANES)
                with tir.loop(blocks) as block:
                    row = tir.let(block * self.FEW_ROWS)
                    at_strip(weight, strip, partial(self._few_rows, weight, matrix, strip, row, column))

    def _few_rows(self, weight: Weight, matrix: Expr, strip: Expr, row: Expr, column: Expr, width: int) -> None:
        corner = weight.strip_of(matrix, strip, width)[0]
        start = tir.let(row * self._long_stride)
        words, per_word = (_GROUP // 4, 4) if weight.quantized else (_GROUP, 1)
        # eight sums hide the latency of multiply-adds: of a panel in narrow registers, of two in wide ones
        side = 2 if self.sizes.panels == 2 and width % 2 == 0 else 1
        with tir.loop(-(-weight.columns // _GROUP)) as group, tir.loop(width // side) as pair:
            lane = tir.let(pair * side)
            panels = [
                Panel(tir.let(corner.data + lane + i), width, tir.let(corner.scale + lane + i), corner.scale_step)
                for i in range(side)
            ]
            place = tir.let(row * self.width + column + lane * (self.streams * LANES))
            places = [
                [place + (r * self.width + i * self.streams * LANES) for r in range(self.FEW_ROWS)] for i in range(side)
            ]
            sums = [[tir.local(tir.load(self.sums, place)) for place in line] for line in places]
            scales = [tir.let(weight.scales(panel, group)) if weight.quantized else None for panel in panels]
            # panels of a group are read side by side, which no hardware prefetcher follows: ask for two groups on
            ahead = tir.let(corner.data + (group + 2) * (words * width) + lane * words)
            left: Expr = words
            if weight.columns % _GROUP:
                left = tir.minimum(tir.i64(words), tir.i64(weight.columns) - group * _GROUP)
            with tir.loop(left) as w:
                index = tir.let(group * words + w)
                at = tir.let(start + index * per_word)
                for i, (panel, scale, totals) in enumerate(zip(panels, scales, sums, strict=True)):
                    tir.prefetch(weight.data, (ahead + w * side + i) * LANES)
                    for k, value in enumerate(weight.columns_of(panel, index, scale)):
                        value = tir.let(value)
                        for r, total in enumerate(totals):
                            x = tir.splat(self._rows[at + (r * self._long_stride + k)], LANES)
                            total.set(tir.fma(x, value, total.value))
            for line, totals in zip(places, sums, strict=True):
                for place, total in zip(line, totals, strict=True):
                    tir.put(self.sums, place, total.value)

    # -- many rows: strips are decoded to memory, once for all rows of the task

    def _run_many(self, count: Expr, source: Rows, matrix: Expr, first: Expr, strips: Expr) -> None:
        sizes, weight = self.sizes, self.weights[0]
        with tir.loop(-(-weight.columns // sizes.depth)) as chunk:
            start = tir.let(chunk * sizes.depth)
            length: Expr = min(weight.columns, sizes.depth)
            if weight.columns % length:
                length = tir.let(tir.minimum(tir.i64(length), tir.i64(weight.columns) - start))
            self._copy_rows(count, source, start, length, self._stride)
            with tir.loop(strips) as s:
                strip = tir.let(first + s)
                for stream in range(self.streams):
                    at_strip(weight, strip, partial(self._decode, stream, matrix, strip, start, length))
                panels = tir.let(tir.minimum(tir.i64(weight.strip), tir.i64(weight.panels) - strip * weight.strip))
                with tir.loop((panels * self.streams + (sizes.panels - 1)) // sizes.panels) as unit:
                    column = s * (weight.strip * self.streams) + unit * sizes.panels
                    self._multiply(count, unit, tir.let(column * LANES), length)

    def _copy_rows(self, count: Expr, source: Rows, start: Expr, length: Expr, stride: int) -> None:
        with tir.loop(count) as row:
            base = tir.let(row * stride)

            def copy(index: Expr, lanes: int, row: Expr = row, base: Expr = base) -> None:
                tir.put(self._rows, base + index, source(row, start + index, lanes))

            _each(length, self.weights[0].columns, copy)

    def _decode(self, stream: int, matrix: Expr, strip: Expr, start: Expr, length: Expr, width: int) -> None:
        """A stretch of a strip, as register tiles read it: [units, depth, panels of the tile, 16]."""
        weight, tile = self.weights[stream], self.sizes.panels
        panels = weight.strip_of(matrix, strip, width)

        def place(j: int, k: Expr) -> Expr:
            unit, slot = divmod(j * self.streams + stream, tile)
            return (k + unit * self.sizes.depth) * (tile * LANES) + slot * LANES

        if not weight.quantized:
            with tir.loop(length) as k:
                for j, panel in enumerate(panels):
                    tir.put(self._decoded, place(j, k), weight.columns_of(panel, start + k, None)[0])
            return
        with tir.loop(length // _GROUP) as group:
            scales = [tir.let(weight.scales(panel, start // _GROUP + group)) for panel in panels]
            with tir.loop(_GROUP // 4) as quad:
                index = tir.let(group * (_GROUP // 4) + quad)
                for j, panel in enumerate(panels):
                    for k, column in enumerate(weight.columns_of(panel, start // 4 + index, scales[j])):
                        tir.put(self._decoded, place(j, index * 4 + k), column)

    def _multiply(self, count: Expr, unit: Expr, column: Expr, length: Expr) -> None:
        sizes = self.sizes
        decoded = tir.let(unit * (sizes.depth * sizes.panels * LANES))
        whole = tir.let(count // sizes.rows)
        with tir.loop(whole) as block:
            self._register_tile(block * sizes.rows, sizes.rows, decoded, column, length)
        done = tir.let(whole * sizes.rows)
        with tir.loop((count - done + (sizes.rest_rows - 1)) // sizes.rest_rows) as block:
            self._register_tile(done + block * sizes.rest_rows, sizes.rest_rows, decoded, column, length)

    def _register_tile(self, first_row: Expr, rows: int, decoded: Expr, column: Expr, length: Expr) -> None:
        width = self.sizes.panels
        row = tir.let(first_row)
        base, corner = tir.let(row * self._stride), tir.let(row * self.width + column)
        places = [[corner + (r * self.width + j * LANES) for j in range(width)] for r in range(rows)]
        sums = [[tir.local(tir.load(self.sums, place)) for place in line] for line in places]
        with tir.loop(length) as k:
            at = tir.let(decoded + k * (width * LANES))
            columns = [tir.let(tir.load(self._decoded, at + j * LANES)) for j in range(width)]
            for r in range(rows):
                value = tir.let(tir.splat(self._rows[base + k + r * self._stride], LANES))
                for j in range(width):
                    sums[r][j].set(tir.fma(value, columns[j], sums[r][j].value))
        for line, totals in zip(places, sums, strict=True):
            for place, total in zip(line, totals, strict=True):
                tir.put(self.sums, place, total.value)


def task_panels(weight: Weight, first: Expr, strips: Expr) -> Expr:
    """Panels in `strips` strips of a matrix from strip `first` on."""
    return tir.let(tir.minimum(strips * weight.strip, tir.i64(weight.panels) - first * weight.strip))


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
