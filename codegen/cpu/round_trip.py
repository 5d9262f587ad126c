"""Quantisation to a group-scaled format and back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from v41c.codegen.cpu.frame import Body, bound_of, build_kernel
from v41c.codegen.cpu.sparse import Types, required
from v41c.codegen.cpu.tir import (
    LANES,
    absolute,
    clamp,
    const,
    join_lanes,
    let,
    load,
    maximum,
    minimum,
    parallel,
    power_of_two,
    product,
    round_e2m1,
    round_e4m3,
    scale_exponent,
    splat,
    store,
)
from v41c.codegen.kernel import CpuKernel
from v41c.ir import formats
from v41c.ir.ops.round_trip import RoundTrip
from v41c.ir.types import TensorType

if TYPE_CHECKING:
    from v41c.targets.target import Target


def kernel(
    op: RoundTrip, operands: Types, results: tuple[TensorType, ...], target: Target, bounds: Mapping[str, int]
) -> CpuKernel:
    """The kernel."""
    (kind,) = required(operands, 0)
    format = formats.FORMATS[op.format]
    groups = math.prod(int(dim) for dim in kind.shape[1:]) // format.group
    pair = format.group // LANES

    def emit(body: Body) -> None:
        (x,), (out,) = body.operands, body.results
        work = 8 * bound_of(kind.shape[0], bounds) * groups * format.group
        with parallel(body.size(kind.shape[0]) * groups, work) as group:
            start = let(group * format.group)
            values = [let(load(x, start + part * LANES)) for part in range(pair)]
            sizes = [let(absolute(value)) for value in values]
            largest = sizes[0] if pair == 1 else let(maximum(sizes[0], sizes[1]))
            amax = let(maximum(const(format.floor), let(join_lanes(largest, maximum))))
            if format.power_of_two:
                scale = let(power_of_two(let(scale_exponent(amax, format.largest))))
            else:
                scale = let(round_e4m3(let(minimum(const(448.0), let(amax / const(format.largest))))))
            rounded = round_e4m3 if format.element_bits == 8 else round_e2m1
            for part, value in enumerate(values):
                steps = let(clamp(value / splat(scale, LANES), format.largest))
                store(out, start + part * LANES, product(rounded(steps), splat(scale, LANES)))

    return build_kernel(emit, op, operands, results, bounds)
