"""Choice of experts: scores, the best by score plus bias in ascending order, their weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tvm.script.ir_builder import tirx as T

from v41c.codegen.cpu.frame import Body, bound_of, build_kernel
from v41c.codegen.cpu.numeric import (
    exp,
    sigmoid,
)
from v41c.codegen.cpu.selection import LOWEST, order_keys, prune
from v41c.codegen.cpu.sparse import Types, array, required, round_up
from v41c.codegen.cpu.tir import (
    LANES,
    Buffer,
    Expr,
    absolute,
    cast,
    const,
    each,
    fma,
    fold,
    lanes_of,
    let,
    load,
    local,
    loop,
    maximum,
    parallel,
    put,
    sqrt,
)
from v41c.codegen.kernel import CpuKernel
from v41c.ir.ops.route import Route
from v41c.ir.types import TensorType

if TYPE_CHECKING:
    from v41c.targets.target import CpuTarget

_WORK = 60  # multiply-adds that an expert's score and choice are worth


def kernel(
    op: Route, operands: Types, results: tuple[TensorType, ...], target: CpuTarget, bounds: Mapping[str, int]
) -> CpuKernel:
    """The kernel."""
    (logits,) = required(operands, 0)
    bound = bound_of(logits.shape[0], bounds)

    def emit(body: Body) -> None:
        choose(op, body.operands, body.results, int(logits.shape[1]), body.size(logits.shape[0]), bound)

    return build_kernel(emit, op, operands, results, bounds)


def choose(
    op: Route, operands: Sequence[Buffer], results: Sequence[Buffer], count: int, tokens: Expr, bound: int
) -> None:
    """The choice among `count` experts for every token, from logits, bias, image bias and image."""
    (values, bias, image_bias, image), (ids, weights) = operands, results
    room = round_up(count) + LANES
    with parallel(tokens, _WORK * bound * count) as token:
        scores = array(count)
        _score(op, values, token * count, scores, count)
        memory = array(2 * room, "int32")  # order keys, then expert numbers

        def rank(i: Expr, lanes: int) -> None:
            chosen = load(bias, i, lanes)
            if image is not None:
                chosen = T.if_then_else(T.NE(image[token], T.uint8(0)), load(image_bias, i, lanes), chosen)
            put(memory, i, order_keys(let(load(scores, i, lanes) + let(chosen))))

        each(count, rank)
        with loop(count) as expert:
            put(memory, expert + room, cast(expert, "int32"))
        kept = local(T.int64(count))
        prune(memory, T.int64(0), T.int64(room), kept, op.experts, local(T.int32(LOWEST)))
        total = local(const(0.0))
        with loop(op.experts) as i:
            expert = let(memory[i + room])
            put(ids, token * op.experts + i, expert)
            total.set(total.value + scores[expert])
        divisor = total.value + const(1e-20) if op.normalize and op.experts > 1 else const(1.0)
        divisor = let(divisor)
        with loop(op.experts) as i:
            put(weights, token * op.experts + i, scores[memory[i + room]] / divisor * const(op.scale))


def _score(op: Route, logits: Buffer, start: Expr, scores: Buffer, count: int) -> None:
    start = let(start)

    def scaled(i: Expr, lanes: int) -> Expr:
        return let(load(logits, start + i, lanes) / const(op.temperature, lanes))

    if op.score == "softmax":
        largest = let(fold(count, float("-inf"), lambda top, i, lanes: maximum(scaled(i, lanes), top), maximum))

        def exponential(i: Expr, lanes: int) -> None:
            put(scores, i, exp(scaled(i, lanes) - T.broadcast(largest, lanes) if lanes > 1 else scaled(i, 1) - largest))

        each(count, exponential)
        total = let(fold(count, 0.0, lambda total, i, lanes: total + load(scores, i, lanes), lambda a, b: a + b))
        each(count, lambda i, lanes: put(scores, i, load(scores, i, lanes) / _splat(total, lanes)))
        return
    score = sigmoid if op.score == "sigmoid" else _sqrt_softplus
    each(count, lambda i, lanes: put(scores, i, score(scaled(i, lanes))))


def _splat(value: Expr, lanes: int) -> Expr:
    return T.broadcast(value, lanes) if lanes > 1 else value


def _sqrt_softplus(x: Expr) -> Expr:
    """√ln(1 + e^x), relative error below 2e-7 for all x.

    ln(1 + e^x) = max(x, 0) + ln(1 + u), u = e^−|x|; ln(1 + u) = 2 artanh(s), s = u / (2 + u) ≤ 1/3, by its series.
    """
    lanes = lanes_of(x)
    u = let(exp(const(0.0, lanes) - absolute(x)))
    s = let(u / (u + const(2.0, lanes)))
    z = let(s * s)
    series = const(1.0 / 15.0, lanes)
    for power in (13, 11, 9, 7, 5, 3):
        series = fma(series, z, const(1.0 / power, lanes))
    log = fma(let(s * z), series, s) * const(2.0, lanes)
    return sqrt(maximum(x, const(0.0, lanes)) + log)
