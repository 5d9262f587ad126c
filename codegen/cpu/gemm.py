"""Products of several rows with packed weights, as tasks of rows x strips of outputs.

Every output is one chain of fused multiply-adds over ascending k, starting at zero, whatever the number of rows or
threads, or a chain of such sums of a group (`Weight.by_group`); so a token's result does not depend on its company.

A few rows are multiplied straight from the packed weights, decoded once for four rows. For many, a task copies its rows
and, per stretch of k, decodes strips into cache, then runs a register tile over both (Goto and van de Geijn, "Anatomy
of high-performance matrix multiplication", 2008).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from v41c.codegen.cpu import tir
from v41c.codegen.cpu.gemv import Rows
from v41c.codegen.cpu.packed import GROUP, Panel, Weight, at_strip
from v41c.codegen.cpu.tir import LANES, Expr, Local


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

    def __init__(self, sizes: Tiling, weights: Sequence[Weight], *, often_fewer: bool = False) -> None:
        """`often_fewer`: up to three rows are so frequent that they get code of their own."""
        self._often_fewer = often_fewer
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
        alone = range(1, self.FEW_ROWS) if self._often_fewer else range(0)
        blocks: Expr = tir.let((count + (self.FEW_ROWS - 1)) // self.FEW_ROWS)
        if alone:
            blocks = tir.let(tir.select(count < self.FEW_ROWS, tir.i64(0), blocks))
        with tir.loop(strips) as s:
            for stream, weight in enumerate(self.weights):
                strip, column = tir.let(first + s), tir.let((s * weight.strip * self.streams + stream) * LANES)
                for rows in alone:
                    with tir.when(count == rows):
                        at_strip(
                            weight, strip, partial(self._few_rows, weight, matrix, strip, tir.i64(0), rows, column)
                        )
                with tir.loop(blocks) as block:
                    row = tir.let(block * self.FEW_ROWS)
                    at_strip(weight, strip, partial(self._few_rows, weight, matrix, strip, row, self.FEW_ROWS, column))

    def _few_rows(
        self, weight: Weight, matrix: Expr, strip: Expr, row: Expr, rows: int, column: Expr, width: int
    ) -> None:
        corner = weight.strip_of(matrix, strip, width)[0]
        start = tir.let(row * self._long_stride)
        words, per_word = (GROUP // 4, 4) if weight.quantized else (GROUP, 1)
        # eight sums hide the latency of multiply-adds: of four rows and a panel in narrow registers, of two in wide
        # ones, and where there are fewer rows
        side = 2 if (self.sizes.panels == 2 or rows <= 2) and width % 2 == 0 else 1
        with tir.loop(-(-weight.columns // GROUP)) as group, tir.loop(width // side) as pair:
            lane = tir.let(pair * side)
            panels = [
                Panel(tir.let(corner.data + lane + i), width, tir.let(corner.scale + lane + i), corner.scale_step)
                for i in range(side)
            ]
            place = tir.let(row * self.width + column + lane * (self.streams * LANES))
            places = [[place + (r * self.width + i * self.streams * LANES) for r in range(rows)] for i in range(side)]
            sums = [[self._begin(weight, place) for place in line] for line in places]
            scaled = weight.quantized and not weight.by_group
            scales = [tir.let(weight.scales(panel, group)) if scaled else None for panel in panels]
            # panels of a group are read side by side, which no hardware prefetcher follows: ask for two groups on
            ahead = tir.let(corner.data + (group + 2) * (words * width) + lane * words)
            left: Expr = words
            if weight.columns % GROUP:
                left = tir.minimum(tir.i64(words), tir.i64(weight.columns) - group * GROUP)
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
            for panel, line, totals in zip(panels, places, sums, strict=True):
                scale = tir.let(weight.scales(panel, group)) if weight.by_group else None
                for place, total in zip(line, totals, strict=True):
                    self._end(weight, place, total, scale)

    def _begin(self, weight: Weight, place: Expr) -> Local:
        """A sum in a register: what is there so far, or that of a group of its own."""
        return tir.local(tir.const(0.0, LANES) if weight.by_group else tir.load(self.sums, place))

    def _end(self, weight: Weight, place: Expr, total: Local, scale: Expr | None) -> None:
        """Put a sum back, or add it, times its scale if its weights were not scaled."""
        value = total.value
        if weight.by_group:
            so_far = tir.load(self.sums, place)
            value = so_far + value if scale is None else tir.fma(value, scale, so_far)
        tir.put(self.sums, place, value)

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
        with tir.loop(length // GROUP) as group:
            scales = [tir.let(weight.scales(panel, start // GROUP + group)) for panel in panels]
            with tir.loop(GROUP // 4) as quad:
                index = tir.let(group * (GROUP // 4) + quad)
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
        weight = self.weights[0]
        groups, size = (length // GROUP, GROUP) if weight.by_group else (1, length)
        with tir.loop(groups) as group:
            sums = [[self._begin(weight, place) for place in line] for line in places]
            with tir.loop(size) as step:
                k = tir.let(group * GROUP + step)
                at = tir.let(decoded + k * (width * LANES))
                columns = [tir.let(tir.load(self._decoded, at + j * LANES)) for j in range(width)]
                for r in range(rows):
                    value = tir.let(tir.splat(self._rows[base + k + r * self._stride], LANES))
                    for j in range(width):
                        sums[r][j].set(tir.fma(value, columns[j], sums[r][j].value))
            for line, totals in zip(places, sums, strict=True):
                for place, total in zip(line, totals, strict=True):
                    self._end(weight, place, total, None)


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
