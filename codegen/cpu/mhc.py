"""What the fused residual operations share: one pass over a token's stream, then its coefficients and its norm.

The parts keep the order of operations of their own kernels, so that a fused engine and an unfused one agree to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from v41c.codegen.cpu import quantize, rms_norm, tir
from v41c.codegen.cpu.tir import Buffer, Expr
from v41c.ir import formats

if TYPE_CHECKING:
    from v41c.ir.ops.mhc_boundary import MhcBoundary
    from v41c.ir.ops.mhc_enter import MhcEnter

#: stores the 16 (or 1) new values of every copy at a column of a row, and returns them as f32
Columns = Callable[[Expr, Expr, int], list[Expr]]


class Entry:
    """u = norm(mix(stream, pre)) of one row, and its round trip, from the columns of the stream as they come."""

    def __init__(
        self, op: MhcBoundary | MhcEnter, pre: Buffer, weight: Buffer, out: list[Buffer], copies: int, width: int
    ) -> None:
        self.op, self.pre, self.weight, self.out = op, pre, weight, out
        self.copies, self.width = copies, width

    def row(self, row: Expr, columns: Columns) -> None:
        """Take the row's columns one vector after another, mix them on the way, then norm what was mixed."""
        row = tir.let(row)
        start = tir.let(row * self.width)
        mix = [tir.let(self.pre[row * self.copies + copy]) for copy in range(self.copies)]
        u = self.out[0]

        def step(i: Expr, lanes: int) -> None:
            values = columns(row, i, lanes)
            total = tir.product(tir.splat(mix[0], lanes), values[0])
            for factor, value in zip(mix[1:], values[1:], strict=True):
                total = tir.let(total + tir.product(tir.splat(factor, lanes), value))
            tir.store(u, start + i, total)

        tir.each(self.width, step)
        rms_norm.norm_row(u, self.weight, u, start, self.width, self.op.norm_eps)
        if self.op.format != "none":  # the row's u is still in the first-level cache
            quantize.round_trip_run(u, self.out[1], start, self.width, formats.FORMATS[self.op.format])
