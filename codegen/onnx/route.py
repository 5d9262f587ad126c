"""Choice of experts and their weights."""

from __future__ import annotations

from v41c.codegen.onnx.body import Body, Term
from v41c.codegen.onnx.rows import best_ascending
from v41c.ir.ops.route import Route


def body(
    f: Body, op: Route, logits: Term, bias: Term, image_bias: Term | None = None, image: Term | None = None
) -> tuple[Term, Term]:
    """The bias chooses and does not weigh."""
    s = _score(f, op, logits / op.temperature)
    biased = s + bias
    if image is not None and image_bias is not None:
        biased = f.Where(f.column(image), s + image_bias, biased)
    ids = best_ascending(f, biased, op.experts)
    weights = f.GatherElements(s, ids, axis=1)
    if op.normalize and op.experts > 1:
        weights = weights / (f.ReduceSum(weights, [1], keepdims=1) + 1e-20)
    return ids, weights * op.scale


def _score(f: Body, op: Route, logits: Term) -> Term:
    if op.score == "sigmoid":
        return f.Sigmoid(logits)
    if op.score == "softmax":
        return f.Softmax(logits, axis=-1)
    # softplus(x) = max(x, 0) + log(1 + u), u = exp(−|x|); a plain logarithm loses a small u, and log(w) / (w − 1) of
    # the rounded w = 1 + u does not
    u = f.Exp(-f.Abs(logits))
    w = u + 1.0
    log1p = f.Where(f.Equal(w, 1.0), u, u * (f.Log(w) / (w - 1.0)))
    return f.Sqrt(f.Max(logits, 0.0) + log1p)
