"""Rotation angles: an f32 angle, its sine and cosine by argument reduction and polynomials in f64, rounded once.

The result is the correctly rounded one but for ties nearer than 2^-50, at any position.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tvm.script.ir_builder import tirx as T

from v41c.codegen.cpu.frame import Body, bound_of, build_kernel
from v41c.codegen.cpu.sparse import Types, required
from v41c.codegen.cpu.tir import (
    Expr,
    cast,
    constants,
    iconst,
    lanes_of,
    let,
    parallel,
    product,
    put,
    select,
    splat,
    vec,
)
from v41c.codegen.kernel import CpuKernel
from v41c.ir.ops.rope_table import RopeTable
from v41c.ir.types import TensorType

if TYPE_CHECKING:
    from v41c.targets.target import CpuTarget

_LANES = 8
_WORK = 40  # multiply-adds that a pair is worth

# pi / 2 as a sum of two f64: enough for quadrants up to 2^30
_HALF_PI, _HALF_PI_REST = 1.5707963267948966, 6.123233995736766e-17
# Taylor-like minimax coefficients on |r| ≤ pi / 4, lowest power last (fdlibm, k_sin.c and k_cos.c)
_SIN = (
    1.58969099521155010221e-10,
    -2.50507602534068634195e-08,
    2.75573137070700676789e-06,
    -1.98412698298579493134e-04,
    8.33333333332248946124e-03,
    -1.66666666666666324348e-01,
)
_COS = (
    -1.13596475577881948265e-11,
    2.08757232129817482790e-09,
    -2.75573143513906633035e-07,
    2.48015872894767294178e-05,
    -1.38888888888741095749e-03,
    4.16666666666666019037e-02,
)


def kernel(
    op: RopeTable, operands: Types, results: tuple[TensorType, ...], target: CpuTarget, bounds: Mapping[str, int]
) -> CpuKernel:
    """The kernel, with the frequencies as constants."""
    (kind,) = required(operands, 0)
    frequencies = [float(value) for value in op.frequencies()]

    def emit(body: Body) -> None:
        (positions,), tables = body.operands, body.results
        pairs = len(frequencies)
        with parallel(body.size(kind.shape[0]), _WORK * bound_of(kind.shape[0], bounds) * pairs) as token:
            position = let(cast(T.max(positions[token] + T.int32(op.offset), T.int32(0)), "float32"))
            for first in range(0, pairs, _LANES):
                count = min(_LANES, pairs - first)
                chunk = frequencies[first : first + count]
                frequency = constants(chunk) if count > 1 else T.float32(chunk[0])
                for table, value in zip(tables, _cos_sin(product(splat(position, count), frequency)), strict=True):
                    put(table, token * pairs + first, value)

    return build_kernel(emit, op, operands, results, bounds)


def _cos_sin(angle: Expr) -> tuple[Expr, Expr]:
    """f32 cosine and sine of f32 angles ≥ 0."""
    lanes = lanes_of(angle)

    def number(value: float) -> Expr:
        return splat(T.float64(value), lanes)

    def fma(a: Expr, b: Expr, c: Expr) -> Expr:
        return T.call_llvm_pure_intrin(vec("float64", lanes), "llvm.fma", a, b, c)

    def polynomial(coefficients: tuple[float, ...], z: Expr) -> Expr:
        total = number(coefficients[0])
        for coefficient in coefficients[1:]:
            total = fma(total, z, number(coefficient))
        return total

    x = let(cast(angle, "float64"))
    turns = let(T.call_llvm_pure_intrin(vec("float64", lanes), "llvm.roundeven", x * number(1.0 / _HALF_PI)))
    r = let(fma(turns, number(-_HALF_PI_REST), fma(turns, number(-_HALF_PI), x)))
    z = let(r * r)
    sine = let(fma(polynomial(_SIN, z), z * r, r))
    cosine = let(fma(polynomial(_COS, z), z * z, fma(z, number(-0.5), number(1.0))))
    quadrant = let(cast(turns, "int32"))

    def bit(value: Expr, pattern: int) -> Expr:
        return T.NE(T.bitwise_and(value, iconst(pattern, lanes)), iconst(0, lanes))

    swapped = bit(quadrant, 1)
    parts = (
        (let(select(swapped, sine, cosine)), bit(quadrant + iconst(1, lanes), 2)),
        (let(select(swapped, cosine, sine)), bit(quadrant, 2)),
    )
    cos, sin = (cast(select(negative, number(0.0) - value, value), "float32") for value, negative in parts)
    return cos, sin
