"""The kernel of a matrix product with one packed weight, plain or in groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from v41c.codegen.cpu import gemm, gemv, layouts, packed, tir
from v41c.codegen.cpu.frame import Body, bound_of, build_kernel
from v41c.codegen.cpu.tir import Expr
from v41c.codegen.kernel import CpuKernel
from v41c.errors import UnsupportedError
from v41c.ir.types import DType, TensorType

if TYPE_CHECKING:
    from v41c.ir.op import Op
    from v41c.targets.target import Target


def weight_layouts(target: Target, kind: TensorType, weight: int, scale: int, groups: int = 1) -> dict[int, str]:
    """Layouts by operand index of a weight [.., M, K] and, where its dtype has one, its scale."""
    names = {DType.F8E4M3: "block_scales", DType.F4E2M1: "row_scales"}
    strip = packed.strip_panels(target, layouts.panels(int(kind.shape[-2]) // groups), kind.dtype in names)
    suffix = f"{strip}:{groups}" if groups > 1 else f"{strip}"
    found = {weight: f"panels{suffix}"}
    return found | {scale: f"{names[kind.dtype]}{suffix}"} if kind.dtype in names else found


def product_kernel(
    op: Op,
    operands: Sequence[TensorType | None],
    results: Sequence[TensorType],
    target: Target,
    bounds: Mapping[str, int],
    groups: int,
) -> CpuKernel:
    """out [T, G · M] = x [T, G · K] · weight [G · M, K]ᵀ within each of G groups."""
    x, weight, _ = operands
    if x is None or weight is None:
        raise UnsupportedError(f"{op.name()} on {target.name}: expected x and weight, got {x} and {weight}")
    rows, columns = (int(dim) for dim in weight.shape)
    rows //= groups
    tokens = bound_of(x.shape[0], bounds)
    if weight.dtype == DType.F8E4M3 and (columns % 32 or (groups > 1 and rows % 32)):
        wanted = "K and, in groups, M multiples of 32"
        raise UnsupportedError(
            f"{op.name()} on {target.name}: fp8 weight: expected {wanted}, got M {rows}, K {columns}"
        )

    def emit(body: Body) -> None:
        matrix = packed.Weight(weight.dtype, rows, columns, body.operands[1], body.operands[2], target)
        (_Token if tokens <= 1 else _Chunk)(body, matrix, groups, body.size(x.shape[0]), tokens).emit()

    return build_kernel(
        emit,
        op,
        operands,
        results,
        bounds,
        layouts=weight_layouts(target, weight, 1, 2, groups),
        storage={1: packed.WORDS[weight.dtype]},
    )


class _Product:
    def __init__(self, body: Body, weight: packed.Weight, groups: int, count: Expr, bound: int) -> None:
        self.body, self.weight, self.groups, self.count, self.bound = body, weight, groups, count, bound
        self.work = max(1, bound) * groups * weight.rows * weight.columns

    def source(self, row: Expr, group: Expr, index: Expr, lanes: int) -> Expr:
        """x[row, group, index …] as f32."""
        return tir.load(self.body.operands[0], (row * self.groups + group) * self.weight.columns + index, lanes)

    def out(self, row: Expr, group: Expr) -> Expr:
        """Index of the first output of a group of a row."""
        return (row * self.groups + group) * self.weight.rows


class _Token(_Product):
    """One token at a time, tasks over panels."""

    def emit(self) -> None:
        weight = self.weight
        with tir.loop(self.count) as row, tir.parallel(self.groups * weight.strips, self.work) as task:
            group, strip = tir.let(task // weight.strips), tir.let(task % weight.strips)

            def source(row: Expr, index: Expr, lanes: int) -> Expr:
                return self.source(row, group, index, lanes)

            x = gemv.widen_row(source, row, weight.columns)
            packed.at_strip(weight, strip, partial(self._strip, x, row, group, strip))

    def _strip(self, x: Expr, row: Expr, group: Expr, strip: Expr, width: int) -> None:
        weight = self.weight
        sums = gemv.dot(weight, weight.strip_of(group, strip, width), x)
        for j, total in enumerate(sums):
            panel = strip * weight.strip + j
            packed.store_panel(self.body.results[0], self.out(row, group), panel, weight.rows, total)


class _Chunk(_Product):
    """Tasks over panels and blocks of rows; tasks of the same panels follow each other."""

    def emit(self) -> None:
        weight = self.weight
        sizes = gemm.tiling(weight, self.bound, self.groups)
        stretches = -(-weight.strips // sizes.task_strips)
        blocks = tir.let((self.count + (sizes.task_rows - 1)) // sizes.task_rows)
        # equal blocks, so that the last is no shorter than it must be
        block_rows = tir.let((self.count + (blocks * sizes.rows - 1)) // tir.maximum(blocks * sizes.rows, tir.i64(1)))
        with tir.parallel(blocks * (self.groups * stretches), self.work) as task:
            block, stretch = tir.let(task % blocks), tir.let(task // blocks)
            group, first = tir.let(stretch // stretches), tir.let(stretch % stretches * sizes.task_strips)
            start = tir.let(block * block_rows * sizes.rows)
            count = tir.let(tir.minimum(block_rows * sizes.rows, self.count - start))
            strips = tir.let(tir.minimum(tir.i64(sizes.task_strips), tir.i64(weight.strips) - first))

            def source(row: Expr, index: Expr, lanes: int) -> Expr:
                return self.source(start + row, group, index, lanes)

            tile = gemm.Tile(sizes, [weight])
            tile.run(count, source, group, first, strips)
            with tir.loop(count) as row:
                base = tir.let(self.out(start + row, group))
                with tir.loop(packed.task_panels(weight, first, strips)) as j:
                    panel = first * weight.strip + j
                    packed.store_panel(self.body.results[0], base, panel, weight.rows, tile.value(row, j))
