"""Pooling of a group of tokens into one compressed latent."""

from __future__ import annotations

import numpy as np

from v41c.codegen.onnx.body import Body, Term
from v41c.codegen.onnx.rows import newest_rows, store
from v41c.ir.ops.compress_pool import CompressPool


def body(
    f: Body, op: CompressPool, partial: Term, k: Term, gate: Term, positions: Term, slots: Term, starts: Term
) -> tuple[Term, Term]:
    """Every token pools the group that ends with it; only those that close one keep the result."""
    position, slot = positions.wide, slots.wide
    rows = f.column(f.arange(f.Shape(slot)))
    members = rows + np.arange(1 - op.ratio, 1)
    inside = f.Unsqueeze(members >= f.column(starts.wide), [-1])
    here, old = f.Max(members, 0), f.Gather(partial, slot)
    ks, gates = (
        f.Where(inside, f.Gather(source, here), f.Gather(old, index, axis=1)) for index, source in enumerate((k, gate))
    )
    pooled = f.ReduceSum(f.Softmax(gates, axis=1) * ks, [1], keepdims=0)
    closing = f.column(f.Equal(position % op.ratio, op.ratio - 1))
    kept = newest_rows(f, slot, position, op.ratio)
    for index, source in enumerate((k, gate)):
        partial = store(f, partial, (slot, f.Expand(index, f.Shape(slot)), position % op.ratio), source, kept)
    return partial, f.Where(closing, pooled, 0.0)
