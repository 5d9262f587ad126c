"""Matrix products with packed weights, plain or in groups, one or several in a launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from tvm.script.ir_builder import tirx as T

from v41c.codegen.cpu import e2m1, gemm, gemv, layouts, packed, quantize, tir
from v41c.codegen.cpu.frame import Body, bound_of, build_kernel
from v41c.codegen.cpu.tir import LANES, Buffer, Expr
from v41c.codegen.kernel import CpuKernel
from v41c.errors import UnsupportedError
from v41c.ir import formats
from v41c.ir.types import DType, TensorType

if TYPE_CHECKING:
    from v41c.ir.op import Op
    from v41c.targets.target import CpuTarget

#: a number of tasks of a launch, and the code of one of them
Tasks = tuple[Expr, Callable[[Expr], None]]


def weight_layouts(
    op: Op, kind: TensorType, target: CpuTarget, weight: int, scale: int, groups: int = 1
) -> dict[int, str]:
    """Layouts by operand index of a weight [.., G · M, K] and, where its dtype has one, its scale.

    UnsupportedError for a weight that its layout cannot hold.
    """
    rows, columns = int(kind.shape[-2]) // groups, int(kind.shape[-1])
    if kind.dtype == DType.F8E4M3 and (columns % 32 or (groups > 1 and rows % 32)):
        wanted = "K and, in groups, M multiples of 32"
        raise UnsupportedError(
            f"{op.name()} on {target.name}: fp8 weight: expected {wanted}, got M {rows}, K {columns}"
        )
    names = {DType.F8E4M3: "block_scales", DType.F4E2M1: "row_scales"}
    strip = packed.strip_panels(target, layouts.panels(rows), kind.dtype in names)
    suffix = f"{strip}:{groups}" if groups > 1 else f"{strip}"
    data = "nibbles" if kind.dtype == DType.F4E2M1 and e2m1.by_bytes(target) else "panels"
    found = {weight: f"{data}{suffix}"}
    return found | {scale: f"{names[kind.dtype]}{suffix}"} if kind.dtype in names else found


def matrix_of(kind: TensorType, data: Buffer, scale: Buffer, target: CpuTarget, groups: int = 1) -> packed.Weight:
    """A weight [G · M, K], or a stack of them, as kernels read it."""
    return packed.Weight(kind.dtype, int(kind.shape[-2]) // groups, int(kind.shape[-1]), data, scale, target)


def product_kernel(
    op: Op,
    operands: Sequence[TensorType | None],
    results: Sequence[TensorType],
    target: CpuTarget,
    bounds: Mapping[str, int],
    weights: Sequence[tuple[int, int]] = ((1, 2),),
    groups: int = 1,
    format: str = "none",
) -> CpuKernel:
    """out [T, G · M] = x [T, G · K] · weight [G · M, K]ᵀ within each of G groups, and to `format` and back.

    `weights`: the operand numbers of every weight and its scale; there is a result for each.
    """
    x = operands[0]
    kinds = {weight: operands[weight] for weight, _ in weights}
    present = {weight: kind for weight, kind in kinds.items() if kind is not None}
    if x is None or len(present) < len(kinds):
        raise UnsupportedError(f"{op.name()} on {target.name}: expected x and weights, got {x} and {kinds}")
    found: dict[int, str] = {}
    for weight, scale in weights:
        found |= weight_layouts(op, present[weight], target, weight, scale, groups)

    def emit(body: Body) -> None:
        products = []
        for (weight, scale), out in zip(weights, body.results, strict=True):
            matrix = matrix_of(present[weight], body.operands[weight], body.operands[scale], target, groups)
            products.append(Product([matrix], body.operands[0], out, groups, format))
        launch(products, body.size(x.shape[0]), bound_of(x.shape[0], bounds))

    storage = {weight: packed.WORDS[kind.dtype] for weight, kind in present.items()}
    return build_kernel(emit, op, operands, results, bounds, layouts=found, storage=storage)


class Product:
    """out [T, G · M] of x [T, G · K] and, in each of G groups, one weight [M, K], or a function of several.

    `starts` are the first elements of x and out in their buffers.
    """

    def __init__(
        self,
        weights: Sequence[packed.Weight],
        x: Buffer,
        out: Buffer,
        groups: int = 1,
        format: str = "none",
        starts: tuple[Expr, Expr] = (0, 0),
    ) -> None:
        self.weights, self.x, self.out, self.groups = weights, x, out, groups
        self.format = None if format == "none" else formats.FORMATS[format]
        self.starts = starts
        #: panels that are finished together: a group of the format
        self.unit = 1 if self.format is None else self.format.group // LANES

    def work(self, tokens: int) -> int:
        """Multiply-adds for so many tokens."""
        weight = self.weights[0]
        return max(1, tokens) * self.groups * weight.rows * weight.columns * len(self.weights)

    def finish(self, row: Expr, panel: Expr, sums: list[list[Expr]]) -> list[Expr]:
        """What is stored at `unit` panels of a row from `panel` on, of their sums with each weight."""
        (values,) = sums
        if self.format is None:
            return values
        rounded = [tir.let(tir.bf16(value) if self.out.dtype == "uint16" else value) for value in values]
        return quantize.round_trip(rounded, self.format)

    def source(self, row: Expr, group: Expr, index: Expr, lanes: int) -> Expr:
        """x[row, group, index …] as f32."""
        start = (row * self.groups + group) * self.weights[0].columns + self.starts[0]
        return tir.load(self.x, start + index, lanes)

    def _store(self, row: Expr, group: Expr, panel: Expr, sums: list[list[Expr]]) -> None:
        weight = self.weights[0]
        base = tir.let((row * self.groups + group) * weight.rows + self.starts[1])
        for j, value in enumerate(self.finish(row, panel, sums)):
            packed.store_panel(self.out, base, panel + j, weight.rows, value)

    # -- one token: tasks over strips

    def token_tasks(self, row: Expr) -> Tasks:
        """The product of one token; its tasks share the conversion of x."""
        weight = self.weights[0]
        whole = None if self.groups > 1 else self._widen(row, tir.i64(0))

        def run(task: Expr) -> None:
            group, strip = tir.let(task // weight.strips), tir.let(task % weight.strips)
            x = self._widen(row, group) if whole is None else whole
            packed.at_strip(weight, strip, partial(self._strip, x, row, group, strip))

        return self.groups * weight.strips, run

    def _widen(self, row: Expr, group: Expr) -> Buffer:
        def source(row: Expr, index: Expr, lanes: int) -> Expr:
            return self.source(row, group, index, lanes)

        return gemv.widen_row(source, row, self.weights[0].columns)

    def _strip(self, x: Buffer, row: Expr, group: Expr, strip: Expr, width: int) -> None:
        sums = [gemv.dot(weight, weight.strip_of(group, strip, width), x) for weight in self.weights]
        for first in range(0, width, self.unit):
            panel = tir.let(strip * self.weights[0].strip + first)
            self._store(row, group, panel, [part[first : first + self.unit] for part in sums])

    # -- a chunk: tasks over strips and blocks of rows, tasks of the same strips follow each other

    def chunk_tasks(self, rows: Expr, bound: int) -> Tasks:
        """The products of so many rows, at most `bound`."""
        weight = self.weights[0]
        sizes = gemm.tiling(weight, bound, self.groups, len(self.weights))
        stretches = -(-weight.strips // sizes.task_strips)
        blocks = tir.let((rows + (sizes.task_rows - 1)) // sizes.task_rows)
        # equal blocks, so that the last is no shorter than it must be
        block_rows = tir.let((rows + (blocks * sizes.rows - 1)) // tir.maximum(blocks * sizes.rows, tir.i64(1)))

        def run(task: Expr) -> None:
            block, stretch = tir.let(task % blocks), tir.let(task // blocks)
            group, first = tir.let(stretch // stretches), tir.let(stretch % stretches * sizes.task_strips)
            start = tir.let(block * block_rows * sizes.rows)
            count = tir.let(tir.minimum(block_rows * sizes.rows, rows - start))
            strips = tir.let(tir.minimum(tir.i64(sizes.task_strips), tir.i64(weight.strips) - first))

            def source(row: Expr, index: Expr, lanes: int) -> Expr:
                return self.source(start + row, group, index, lanes)

            tile = gemm.Tile(sizes, self.weights)
            tile.run(count, source, group, first, strips)
            streams = len(self.weights)
            with tir.loop(count) as row, tir.loop(packed.task_panels(weight, first, strips) // self.unit) as unit:
                column = tir.let(unit * (self.unit * streams))
                sums = [
                    [tile.value(row, column + (j * streams + stream)) for j in range(self.unit)]
                    for stream in range(streams)
                ]
                self._store(start + row, group, tir.let(first * weight.strip + unit * self.unit), sums)

        return blocks * (self.groups * stretches), run


def launch(products: Sequence[Product], count: Expr, bound: int) -> None:
    """Several products of the same rows at once."""
    work = sum(product.work(bound) for product in products)
    if bound > 1:
        share([product.chunk_tasks(count, bound) for product in products], work)
        return
    with tir.loop(count) as row:
        share([product.token_tasks(row) for product in products], work)


def share(parts: Sequence[Tasks], work: int) -> None:
    """The tasks of several parts of a launch in one loop over threads."""
    ends = [parts[0][0]]
    for tasks, _ in parts[1:]:
        ends.append(tir.let(ends[-1] + tir.i64(tasks)))
    with tir.parallel(ends[-1], work) as task:
        if len(parts) == 1:
            parts[0][1](task)
            return
        for begin, end, (_, run) in zip([tir.i64(0), *ends], ends, parts, strict=False):
            with tir.when(T.And(task >= begin, task < end)):
                run(tir.let(task - begin))
