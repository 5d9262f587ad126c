"""Gated addition of Engram values to the residual stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tvm.script.ir_builder import tirx as T

from v41c.codegen.cpu.frame import Body, bound_of, build_kernel
from v41c.codegen.cpu.numeric import (
    sigmoid,
    with_sign,
)
from v41c.codegen.cpu.sparse import Types, required
from v41c.codegen.cpu.tir import (
    Expr,
    absolute,
    bits,
    const,
    each,
    fma,
    fold,
    let,
    load,
    maximum,
    parallel,
    product,
    splat,
    sqrt,
    store,
    sum_squares,
)
from v41c.codegen.kernel import CpuKernel
from v41c.ir.ops.engram_gate import EngramGate
from v41c.ir.types import TensorType

if TYPE_CHECKING:
    from v41c.targets.target import CpuTarget


def kernel(
    op: EngramGate, operands: Types, results: tuple[TensorType, ...], target: CpuTarget, bounds: Mapping[str, int]
) -> CpuKernel:
    """The kernel."""
    (stream,) = required(operands, 0)
    copies, width = int(stream.shape[1]), int(stream.shape[2])
    image_type = operands[4]

    def emit(body: Body) -> None:
        (x, kv, q_weight, k_weight, image), (out,) = body.operands, body.results
        work = 4 * bound_of(stream.shape[0], bounds) * copies * width
        with parallel(body.size(stream.shape[0]) * copies, work) as row:
            token, copy = let(row // copies), let(row % copies)
            start, weight = let(row * width), let(copy * width)
            key = let(token * ((copies + 1) * width) + weight)
            value = let(token * ((copies + 1) * width) + copies * width)

            def step(total: Expr, i: Expr, lanes: int) -> Expr:
                left = load(x, start + i, lanes) * load(q_weight, weight + i, lanes)
                return fma(left * load(k_weight, weight + i, lanes), load(kv, key + i, lanes), total)

            def inverse_norm(mean_of: Expr) -> Expr:
                return const(1.0) / sqrt(mean_of / const(float(width)) + const(op.eps))

            score = let(fold(width, 0.0, step, lambda a, b: a + b) * const(width**-0.5))
            for norm in (inverse_norm(sum_squares(x, start, width)), inverse_norm(sum_squares(kv, key, width))):
                score = let(score * norm)
            root = sqrt(maximum(absolute(score), const(1e-6)))
            gate = let(sigmoid(let(with_sign(root, bits(score)))))
            if image_type is not None:
                gate = let(T.Select(image[token] == 0, gate, const(0.0)))

            def add(i: Expr, lanes: int) -> None:
                gated = product(splat(gate, lanes), load(kv, value + i, lanes))
                store(out, start + i, load(x, start + i, lanes) + gated)

            each(width, add)

    return build_kernel(emit, op, operands, results, bounds)
