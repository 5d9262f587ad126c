"""Embeddings of the positions of an image's span, copied from where they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from v41c.codegen.cpu.frame import Body, bound_of, build_kernel
from v41c.codegen.cpu.sparse import Types, required
from v41c.codegen.cpu.tir import Buffer, Expr, cast, each, let, load, parallel, store, when
from v41c.codegen.kernel import CpuKernel
from v41c.ir.ops.place_images import PlaceImages
from v41c.ir.types import TensorType

if TYPE_CHECKING:
    from v41c.targets.target import CpuTarget


def kernel(
    op: PlaceImages, operands: Types, results: tuple[TensorType, ...], target: CpuTarget, bounds: Mapping[str, int]
) -> CpuKernel:
    """The kernel."""
    (kind,) = required(operands, 0)
    width = int(kind.shape[1])

    def emit(body: Body) -> None:
        (x, rows, values, *delimiters), (out,) = body.operands, body.results
        with parallel(body.size(kind.shape[0]), bound_of(kind.shape[0], bounds) * width // 4) as token:
            row, end = let(cast(rows[token], "int64")), let(token * width)

            def copy(source: Buffer, begin: Expr) -> None:
                each(width, lambda i, lanes: store(out, end + i, load(source, begin + i, lanes)))

            with when(row >= 0):
                copy(values, let(row * width))
            for code, source, begin in ((-1, x, end), *zip((-2, -3, -4), delimiters, (0, 0, 0), strict=True)):
                with when(row == code):
                    copy(source, begin)

    return build_kernel(emit, op, operands, results, bounds)
