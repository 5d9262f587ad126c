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
    length, back = int(partial.shape[1]), np.arange(1 - op.ratio, 1)
    members = rows + back
    inside = f.Unsqueeze(members >= f.column(starts.wide), [-1])
    here, there = f.Max(members, 0), (f.column(position) + back) % length
    old = f.GatherND(partial, f.stack_last(f.Expand(f.column(slot), f.Shape(there)), there))
    ks, gates = (
        f.Where(inside, f.Gather(source, here), f.Gather(old, index, axis=2)) for index, source in enumerate((k, gate))
    )
    pooled = f.ReduceSum(f.Softmax(gates, axis=1) * ks, [1], keepdims=0)
    closing = f.column(f.Equal(position % op.ratio, op.ratio - 1))
    kept = newest_rows(f, slot, position, length)
    both = f.Concat(f.Unsqueeze(k, [1]), f.Unsqueeze(gate, [1]), axis=1)
    return store(f, partial, (slot, position % length), both, kept), f.Where(closing, pooled, 0.0)
