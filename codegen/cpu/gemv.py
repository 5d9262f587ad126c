"""Products of one row with packed weights: each weight is read once, straight into multiply-adds.

Every output is one chain of fused multiply-adds over ascending k, starting at zero, or a chain of such sums of a group
(`Weight.by_group`), as in `gemm`: a token's bits do not depend on the kernel that its company makes necessary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from v41c.codegen.cpu import tir
from v41c.codegen.cpu.packed import GROUP, Panel, Weight, decode_e4m3_words
from v41c.codegen.cpu.tir import LANES, Buffer, Expr, Local

#: f32 of an activation: (row, column, lanes)
Rows = Callable[[Expr, Expr, int], Expr]


def dot(weight: Weight, panels: Sequence[Panel], x: Buffer) -> list[Expr]:
    """Σ_k x[k] · weight[panel, k], x in f32, for the panels of a strip at once, 16 outputs each.

    Several sums run side by side because one chain of multiply-adds is bound by their latency.
    """
    sums = [tir.local(tir.const(0.0, LANES)) for _ in panels]
    if weight.dtype == "f8e4m3" and len(panels) == 2:
        _dot_block(weight, panels, x, sums)
    elif weight.quantized:
        _dot_groups(weight, panels, x, sums)
    else:
        with tir.loop(weight.columns) as k:
            for total, panel in zip(sums, panels, strict=True):
                (column,) = weight.columns_of(panel, k, None)
                total.set(tir.fma(tir.splat(x[k], LANES), column, total.value))
    return [tir.let(total.value * tir.const(weight.restore, LANES)) for total in sums]


def _dot_groups(weight: Weight, panels: Sequence[Panel], x: Buffer, sums: Sequence[Local]) -> None:
    """A group of k after the other, added to the sums; or `by_group`, summed alone and then scaled."""
    with tir.loop(weight.columns // GROUP) as group:
        parts, scales = sums, [None if weight.by_group else tir.let(weight.scales(panel, group)) for panel in panels]
        if weight.by_group:
            parts = [tir.local(tir.const(0.0, LANES)) for _ in panels]
        with tir.loop(GROUP // 4) as quad:
            index = tir.let(group * (GROUP // 4) + quad)
            for part, panel, scale in zip(parts, panels, scales, strict=True):
                for j, column in enumerate(weight.columns_of(panel, index, scale)):
                    part.set(tir.fma(tir.splat(x[index * 4 + j], LANES), column, part.value))
        for total, part, panel in zip(sums, parts, panels, strict=True) if weight.by_group else ():
            total.set(tir.fma(part.value, weight.scales(panel, group), total.value))


def _dot_block(weight: Weight, panels: Sequence[Panel], x: Buffer, sums: Sequence[Local]) -> None:
    """A strip of two panels is a block of 32 rows with one scale per group: it goes to x, exactly as to the weights."""
    scaled = tir.scratch(GROUP)
    with tir.loop(weight.columns // GROUP) as group:
        scale = tir.let(weight.scales(panels[0], group))
        for part in range(0, GROUP, LANES):
            tir.put(scaled, part, tir.load(x, group * GROUP + part) * scale)
        with tir.loop(GROUP // 4) as quad:
            for total, panel in zip(sums, panels, strict=True):
                word = weight.data[tir.at((panel.data + (group * (GROUP // 4) + quad) * panel.step) * LANES, LANES)]
                for j, value in enumerate(decode_e4m3_words(tir.let(word))):
                    total.set(tir.fma(tir.splat(scaled[quad * 4 + j], LANES), value, total.value))


def widen_row(source: Rows, row: Expr, columns: int) -> Buffer:
    """A row as f32 in scratch memory."""
    x = tir.scratch(columns)

    def body(index: Expr, lanes: int) -> None:
        tir.put(x, index, source(row, index, lanes))

    tir.each(columns, body)
    return x
