"""Pooling of groups of tokens; threads share out the channels, each of which is on its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tvm.script.ir_builder import tirx as T

from v41c.codegen.cpu.frame import Body, bound_of, build_kernel
from v41c.codegen.cpu.numeric import (
    exp,
)
from v41c.codegen.cpu.sparse import Types, required
from v41c.codegen.cpu.tir import (
    LANES,
    Expr,
    at,
    cast,
    const,
    fma,
    let,
    local,
    loop,
    maximum,
    parallel,
    put,
    store,
    when,
)
from v41c.codegen.kernel import CpuKernel
from v41c.ir.ops.compress_pool import CompressPool
from v41c.ir.types import TensorType

if TYPE_CHECKING:
    from v41c.targets.target import CpuTarget


def kernel(
    op: CompressPool, operands: Types, results: tuple[TensorType, ...], target: CpuTarget, bounds: Mapping[str, int]
) -> CpuKernel:
    """The kernel."""
    state_type, k_type = required(operands, 0, 1)
    ratio, length, width = op.ratio, int(state_type.shape[1]), int(k_type.shape[1])

    def emit(body: Body) -> None:
        (partial, k, gate, positions, slots, starts), (out,) = body.operands, body.results
        tokens = let(body.size(k_type.shape[0]))

        def state(token: Expr, position: Expr, index: int) -> Expr:
            row = cast(slots[token], "int64") * length + cast(position % length, "int64")
            return (row * 2 + index) * width

        def pool(token: Expr, channel: Expr, lanes: int) -> None:
            first = let(token - (ratio - 1))
            start = let(cast(starts[token], "int64"))
            earliest = let(positions[token] - (ratio - 1))

            def member(i: Expr, index: int) -> Expr:
                inside = first + i >= start
                here = T.max(first + i, T.int64(0)) * width + channel
                there = state(token, earliest + cast(i, "int32"), index) + channel
                source = k if index == 0 else gate
                return T.if_then_else(inside, source[at(here, lanes)], partial[at(there, lanes)])

            largest = local(member(T.int64(0), 1))
            with loop(ratio - 1) as i:
                largest.set(maximum(let(member(i + 1, 1)), largest.value))
            total, pooled = local(const(0.0, lanes)), local(const(0.0, lanes))
            with loop(ratio) as i:
                weight = let(exp(member(i, 1) - largest.value))
                total.set(total.value + weight)
                pooled.set(fma(weight, let(member(i, 0)), pooled.value))
            store(out, token * width + channel, pooled.value / total.value)

        def channels(channel: Expr, lanes: int) -> None:
            with loop(tokens) as token:
                closes = let(cast(T.EQ(positions[token] % ratio, T.int32(ratio - 1)), "int32"))
                with when(closes == 1):
                    pool(token, channel, lanes)
                with when(closes == 0):
                    store(out, token * width + channel, const(0.0, lanes))
            # after every read: later tokens over earlier ones
            with loop(tokens) as token:
                for index, source in enumerate((k, gate)):
                    value = source[at(token * width + channel, lanes)]
                    put(partial, state(token, positions[token], index) + channel, value)

        with parallel(width // LANES, 8 * bound_of(k_type.shape[0], bounds) * width) as vector:
            channels(let(vector * LANES), LANES)
        with loop(width % LANES) as rest:
            channels(let(rest + width // LANES * LANES), 1)

    return build_kernel(emit, op, operands, results, bounds)
