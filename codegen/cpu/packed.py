"""Packed weights as kernels read them, and outputs by panels as they write them (`layouts` says what lies where).

A weight is decoded to the same f32 in every kernel; scales are powers of two, so this is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from v41c.codegen.cpu import e2m1, layouts, numeric, tir
from v41c.codegen.cpu.tir import LANES, Buffer, Expr
from v41c.targets.target import CpuTarget

#: TIR dtype of the elements of a packed weight
WORDS = {"f32": "float32", "bf16": "uint16", "f8e4m3": "int32", "f4e2m1": "uint16"}
#: k that share a scale
GROUP = layouts.SCALE_BLOCK
#: e4m3 decodes to value · 2^-120. Half of that comes back with the scale and half with the result, so that neither
#: weights nor scaled activations leave the normal range: exact for scales 2^-57 … 2^67 and activations · scale < 2^67
_HALF_SHIFT = 2.0**60


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
    target: CpuTarget

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
        return 2 * -(-self.rows // GROUP) if self.dtype == "f8e4m3" else self.panels

    def strip_of(self, matrix: Expr, strip: Expr, width: int) -> list[Panel]:
        """The `width` panels of a strip of a matrix of the stack."""
        data = tir.let((matrix * self.panels + strip * self.strip) * self.depth)
        scale = tir.let((matrix * self.scale_panels + strip * self.strip) * (self.columns // GROUP))
        # only the last strip is narrower; its scales may have one panel more
        last = self.scale_panels - self.panels // self.strip * self.strip
        scale_width = width if width == self.strip else min(self.strip, last)
        return [Panel(data + j, width, scale + j, scale_width) for j in range(width)]

    def scales(self, panel: Panel, group: Expr) -> Expr:
        """Factor of 16 outputs over the k of a group of 32, to be given to `columns_of`."""
        place = panel.scale + group * panel.scale_step
        if self.dtype == "f8e4m3":
            code = tir.cast(self.scale[place], "int32")
            return tir.splat(tir.let(numeric.decode_e8m0(code) * tir.const(_HALF_SHIFT)), LANES)
        return numeric.decode_e8m0(tir.cast(self.scale[tir.at(place * LANES, LANES)], "int32"))

    @property
    def by_group(self) -> bool:
        """Whether a product sums each group of k on its own, starting at zero, and adds the sum times the scale.

        Scales are per output here, and a multiplication for each weight would cost as much as the sum. Scaling the
        weights instead gives the same bits: scales are powers of two.
        """
        return self.dtype == "f4e2m1"

    def columns_of(self, panel: Panel, index: Expr, scale: Expr | None) -> list[Expr]:
        """16 weights for each k of one word: k = 4 · index … of a quantised weight, k = index otherwise.

        Without a scale those of a weight that is summed `by_group` are not scaled.
        """

        def scaled(value: Expr) -> Expr:
            return value if scale is None else value * scale

        place = (panel.data + index * panel.step) * LANES
        if not self.quantized:
            return [tir.let(tir.load(self.data, place))]
        word = tir.let(self.data[tir.at(place, LANES)])
        if self.dtype == "f8e4m3":
            return [scaled(value) for value in decode_e4m3_words(word)]
        return [scaled(value) for value in e2m1.decode_words(word, self.target)]


def strip_panels(target: CpuTarget, panels: int, quantized: bool) -> int:
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


def decode_e4m3_words(word: Expr) -> list[Expr]:
    """value · 2^-120 of the four e4m3 in each int32."""
    return [numeric.decode_e4m3_top(tir.shl(word, 24 - 8 * j)) for j in range(4)]


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


def task_panels(weight: Weight, first: Expr, strips: Expr) -> Expr:
    """Panels in `strips` strips of a matrix from strip `first` on."""
    return tir.let(tir.minimum(strips * weight.strip, tir.i64(weight.panels) - first * weight.strip))


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
