"""Quantisation to a group-scaled format and back (`ir.ops.round_trip`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from v41c.codegen.cpu import quantize
from v41c.codegen.cpu.frame import Body, bound_of, build_kernel
from v41c.codegen.cpu.sparse import Types, required
from v41c.codegen.cpu.tir import LANES, let, load, parallel, store
from v41c.codegen.kernel import CpuKernel
from v41c.ir import formats
from v41c.ir.types import TensorType

if TYPE_CHECKING:
    from v41c.ir.ops.round_trip import RoundTrip
    from v41c.targets.target import CpuTarget


def kernel(
    op: RoundTrip, operands: Types, results: tuple[TensorType, ...], target: CpuTarget, bounds: Mapping[str, int]
) -> CpuKernel:
    """x [T, …, K], group by group."""
    (kind,) = required(operands, 0)
    format = formats.FORMATS[op.format]
    groups = math.prod(int(dim) for dim in kind.shape[1:]) // format.group

    def emit(body: Body) -> None:
        (x,), (out,) = body.operands, body.results
        # a group is about as much as 8 multiply-adds an element
        work = 8 * bound_of(kind.shape[0], bounds) * groups * format.group
        with parallel(body.size(kind.shape[0]) * groups, work) as group:
            places = [let(group * format.group + part) for part in range(0, format.group, LANES)]
            for place, value in zip(places, quantize.round_trip([load(x, i) for i in places], format), strict=True):
                store(out, place, value)

    return build_kernel(emit, op, operands, results, bounds)
