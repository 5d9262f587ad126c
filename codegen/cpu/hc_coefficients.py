"""Coefficients of a residual mixing: a narrow f32 product, a root mean square, sigmoids, Sinkhorn normalisation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from tvm import tirx

from v41c.codegen.cpu import gemm, gemv, numeric, packed, tir
from v41c.codegen.cpu.frame import Body, bound_of, build_kernel
from v41c.codegen.cpu.product import weight_layouts
from v41c.codegen.cpu.sparse import Types, required
from v41c.codegen.cpu.tir import LANES, Buffer, Expr
from v41c.codegen.kernel import CpuKernel
from v41c.ir.types import TensorType

if TYPE_CHECKING:
    from v41c.ir.ops.hc_coefficients import HcCoefficients
    from v41c.targets.target import CpuTarget


def kernel(
    op: HcCoefficients, operands: Types, results: tuple[TensorType, ...], target: CpuTarget, bounds: Mapping[str, int]
) -> CpuKernel:
    """pre, post f32 [T, N] and comb f32 [T, N, N] of the stream [T, N, D] and fn [(2 + N) · N, N · D]."""
    stream, fn = required(operands, 0, 1)
    tokens, copies = bound_of(stream.shape[0], bounds), int(stream.shape[1])
    rows, columns = (int(dim) for dim in fn.shape)

    def emit(body: Body) -> None:
        weight = packed.Weight(fn.dtype, rows, columns, body.operands[1], None, target)
        x, _, scale, base = body.operands
        coefficients = Coefficients(op, weight, copies, (x, scale, base), body.results)
        count = body.size(stream.shape[0])
        if tokens <= 1:
            coefficients.tokens(count)
        else:
            coefficients.chunk(count, tokens)

    return build_kernel(emit, op, operands, results, bounds, layouts=weight_layouts(op, fn, target, 1, -1))


class Coefficients:
    """The coefficients of every row of a stream; `inputs` are the stream, scale and base, `results` pre, post, comb."""

    def __init__(
        self,
        op: HcCoefficients,
        weight: packed.Weight,
        copies: int,
        inputs: tuple[Buffer, Buffer, Buffer],
        results: Sequence[Buffer],
    ) -> None:
        self.op, self.weight, self.copies = op, weight, copies
        self.stream, self.scale, self.base = inputs
        self.results = results

    def _source(self, row: Expr, index: Expr, lanes: int) -> Expr:
        return tir.load(self.stream, row * self.weight.columns + index, lanes)

    def tokens(self, count: Expr, before: Callable[[Expr], None] | None = None) -> None:
        """One token after another: the product is bound by memory, which one thread saturates.

        `before` is what is done to a row first.
        """
        with tir.loop(count) as row:
            if before is not None:
                before(row)
            products = tir.scratch(self.weight.panels * LANES)
            x = gemv.widen_row(self._source, row, self.weight.columns)
            with tir.loop(self.weight.strips) as strip:

                def store(width: int, strip: Expr = strip, x: Buffer = x) -> None:
                    sums = gemv.dot(self.weight, self.weight.strip_of(0, strip, width), x)
                    for j, total in enumerate(sums):
                        tir.put(products, (strip * self.weight.strip + j) * LANES, total)

                packed.at_strip(self.weight, strip, store)
            self._finish(row, products, tir.i64(0))

    def chunk(self, count: Expr, bound: int, before: Callable[[Expr], None] | None = None) -> None:
        """Blocks of rows, each with all outputs; `before` is what is done to a row first."""
        sizes = gemm.tiling(self.weight, bound, all_strips=True)
        # a handful of rows is bound by reading the weights, which two threads do faster than one
        handful = gemm.Tile.FEW_ROWS
        step = tir.let(tir.select(count <= 8 * handful, tir.i64(handful), tir.i64(sizes.task_rows)))
        work = bound * self.weight.rows * self.weight.columns
        with tir.parallel((count + (step - 1)) // step, work) as task:
            start = tir.let(task * step)
            rows = tir.let(tir.minimum(step, count - start))
            if before is not None:
                with tir.loop(rows) as row:
                    before(start + row)
            tile = gemm.Tile(sizes, [self.weight])

            def source(row: Expr, index: Expr, lanes: int) -> Expr:
                return self._source(start + row, index, lanes)

            tile.run(rows, source, tir.i64(0), tir.i64(0), tir.i64(self.weight.strips))
            with tir.loop(rows) as row:
                self._finish(start + row, tile.sums, tir.let(row * tile.width))

    def _finish(self, row: Expr, products: Buffer, first: Expr) -> None:
        """The coefficients of a token from products[first …]."""
        n, width, row = self.copies, self.weight.columns, tir.let(row)
        squares = tir.sum_squares(self.stream, tir.let(row * width), width)
        mean = tir.let(squares / tir.const(float(width)))
        inverse = tir.let(tir.const(1.0) / tir.sqrt(mean + tir.const(self.op.norm_eps)))

        def scaled(part: int, start: int, lanes: int) -> Expr:
            m = tir.product(tir.load(products, first + start, lanes), tir.splat(inverse, lanes))
            return tir.let(tir.product(m, tir.splat(self.scale[part], lanes)) + tir.load(self.base, start, lanes))

        pre, post, comb = self.results
        tir.put(pre, row * n, numeric.sigmoid(scaled(0, 0, n)) + tir.const(self.op.eps, n))
        tir.put(post, row * n, numeric.sigmoid(scaled(1, n, n)) * tir.const(2.0, n))
        tir.put(comb, row * (n * n), self._sinkhorn(scaled(2, 2 * n, n * n)))

    def _sinkhorn(self, logits: Expr) -> Expr:
        """Softmax of rows, then columns and rows normalised in turn, columns last; lane k · N + j is comb[k, j]."""
        n = self.copies
        eps = tir.const(self.op.eps, n * n)
        row_of = [[k * n + r for k in range(n) for _ in range(n)] for r in range(n)]
        column_of = [[r * n + j for _ in range(n) for j in range(n)] for r in range(n)]

        def total(value: Expr, picks: Sequence[Sequence[int]], join: Callable[[Expr, Expr], Expr]) -> Expr:
            parts = [tir.let(_pick(value, pick)) for pick in picks]
            whole = parts[0]
            for part in parts[1:]:
                whole = tir.let(join(whole, part))
            return whole

        def normalize(value: Expr, picks: Sequence[Sequence[int]]) -> Expr:
            return value / (total(value, picks, lambda a, b: a + b) + eps)

        powers = tir.let(numeric.exp(logits - total(logits, row_of, tir.maximum)))
        softmax = tir.let(powers / total(powers, row_of, lambda a, b: a + b))
        matrix = tir.local(tir.let(normalize(tir.let(softmax + eps), column_of)))
        with tir.loop(self.op.iterations - 1):
            matrix.set(tir.let(normalize(matrix.value, row_of)))
            matrix.set(tir.let(normalize(matrix.value, column_of)))
        return matrix.value


def _pick(value: Expr, lanes: Sequence[int]) -> Expr:
    return tirx.Shuffle([value], [tirx.IntImm("int32", lane) for lane in lanes]) if len(lanes) > 1 else value
