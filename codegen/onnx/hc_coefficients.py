"""Coefficients of a residual mixing: the Sinkhorn iterations are a Loop."""

from __future__ import annotations

from v41c.codegen.onnx.body import Body, Term
from v41c.ir.ops.hc_coefficients import HcCoefficients


def body(f: Body, op: HcCoefficients, stream: Term, fn: Term, scale: Term, base: Term) -> tuple[Term, ...]:
    """pre, post and comb, in f32."""
    n = int(stream.shape[1])
    flat = f.Reshape(stream.wide, [0, -1])
    rms = f.Sqrt(f.ReduceMean(flat * flat, [-1], keepdims=1) + op.norm_eps)
    m = f.MatMul(flat, f.Transpose(fn, perm=[1, 0])) / rms
    sizes = [n, n, n * n]
    pre, post, comb = (
        part * factor + shift
        for part, factor, shift in zip(
            f.many("Split", 3, m, sizes, axis=1),
            f.many("Split", 3, scale, [1, 1, 1], axis=0),
            f.many("Split", 3, base, sizes, axis=0),
            strict=True,
        )
    )

    def normalized(comb: Term, axis: int) -> Term:
        return comb / (f.ReduceSum(comb, [axis], keepdims=1) + op.eps)

    comb = f.Softmax(f.Reshape(comb, [0, n, n]), axis=-1) + op.eps
    comb = f.repeat(op.iterations - 1, lambda comb: normalized(normalized(comb, -1), -2), normalized(comb, -2))
    return f.Sigmoid(pre) + op.eps, f.Sigmoid(post) * 2.0, comb
