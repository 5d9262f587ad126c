"""Mean over the residual copies."""

from __future__ import annotations

from v41c.codegen.onnx.body import Body, Term
from v41c.ir.ops.stream_mean import StreamMean


def body(f: Body, op: StreamMean, stream: Term) -> Term:
    """In f32."""
    return f.ReduceMean(stream.wide, [1], keepdims=0)
