"""The routed experts of a token: a Scan over the tokens, which decodes the chosen experts' weights only."""

from __future__ import annotations

from v41c.codegen.onnx.body import U8, Body, Term
from v41c.codegen.onnx.formats import round_trip, row_values, weight_values
from v41c.codegen.onnx.swiglu import gated
from v41c.ir.ops.moe_experts import MoeExperts


def body(
    f: Body,
    op: MoeExperts,
    x: Term,
    ids: Term,
    weights: Term,
    w1: Term,
    w3: Term,
    w2: Term,
    w1_scale: Term | None = None,
    w3_scale: Term | None = None,
    w2_scale: Term | None = None,
) -> Term:
    """Products, activations and outputs are rounded to the type of x, the outputs of a token summed in f32."""
    x = row_values(f, x)

    def chosen(stack: Term, scale: Term | None, experts: Term) -> Term:
        weight = f.Gather(stack if stack.dtype == U8 or scale is None else stack.wide, experts)
        return weight_values(f, weight, None if scale is None else f.Gather(scale.wide, experts))

    def rounded(value: Term) -> Term:
        return value.to(x.dtype).wide

    def step(token: Term, experts: Term, factors: Term) -> tuple[Term, ...]:
        gate = rounded(f.MatMul(chosen(w1, w1_scale, experts), token))
        up = rounded(f.MatMul(chosen(w3, w3_scale, experts), token))
        h = rounded(gated(f, gate, up, op.limit) * f.Unsqueeze(factors, [1]))
        if op.format != "none":
            h = rounded(f.call(round_trip, h, format=op.format))
        out = rounded(f.MatMul(chosen(w2, w2_scale, experts), f.Unsqueeze(h, [-1])))
        return (f.ReduceSum(f.Squeeze(out, [-1]), [0], keepdims=0),)

    return f.scan(step, [], [x.wide, ids.wide, weights])[0]
