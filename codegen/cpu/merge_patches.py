"""Patches side by side: every element of a row of the result is one of some patch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tvm.script.ir_builder import tirx as T

from v41c.codegen.cpu.frame import Body, bound_of, build_kernel
from v41c.codegen.cpu.sparse import Types, required
from v41c.codegen.cpu.tir import cast, let, load, loop, parallel, store, when
from v41c.codegen.kernel import CpuKernel
from v41c.ir.ops.merge_patches import MergePatches
from v41c.ir.types import TensorType

if TYPE_CHECKING:
    from v41c.targets.target import CpuTarget


def kernel(
    op: MergePatches, operands: Types, results: tuple[TensorType, ...], target: CpuTarget, bounds: Mapping[str, int]
) -> CpuKernel:
    """The kernel."""
    x_type, sources_type = required(operands, 0, 1)
    width, group = int(x_type.shape[1]), int(sources_type.shape[1])

    def emit(body: Body) -> None:
        (x, sources), (out,) = body.operands, body.results
        rows = sources_type.shape[0]
        with parallel(body.size(rows), bound_of(rows, bounds) * width * group) as row, loop(group) as place:
            source = let(cast(sources[row * group + place], "int64"))
            begin, end = let(source * width), let(row * (width * group) + place)
            with when(source >= 0), loop(width) as i:
                store(out, end + i * group, load(x, begin + i, 1))
            with when(source < 0), loop(width) as i:
                store(out, end + i * group, T.float32(0.0))

    return build_kernel(emit, op, operands, results, bounds)
