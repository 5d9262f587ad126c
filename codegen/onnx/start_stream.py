"""The residual stream after the embedding."""

from __future__ import annotations

import numpy as np

from v41c.codegen.onnx.body import Body, Term
from v41c.ir.ops.start_stream import StartStream


def body(f: Body, op: StartStream, x: Term) -> tuple[Term, Term]:
    """Equal copies, and a mix that reads the first."""
    copies = f.Concat(*[f.column(x)] * op.copies, axis=1)
    first = np.eye(1, op.copies, dtype=np.float32)
    return copies, f.Expand(first, f.Concat(f.Shape(x, end=1), [op.copies], axis=0))
