"""Root-mean-square normalisation."""

from __future__ import annotations

from v41c.codegen.onnx.body import Body, Term
from v41c.ir.ops.rms_norm import RmsNorm


def body(f: Body, op: RmsNorm, x: Term, weight: Term) -> Term:
    """A standard operator, in f32."""
    return f.RMSNormalization(x.wide, weight.wide, axis=-1, epsilon=op.eps)
