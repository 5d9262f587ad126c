"""Low-rank output projection of head groups: one product per group."""

from __future__ import annotations

from v41c.codegen.onnx.body import Body, Term
from v41c.codegen.onnx.formats import weight_values
from v41c.ir.ops.grouped_linear import GroupedLinear


def body(f: Body, op: GroupedLinear, x: Term, weight: Term, scale: Term | None = None) -> Term:
    """[G, T, K] times [G, K, M], f32."""
    groups, columns = (int(dim) for dim in x.shape[1:])
    stacked = f.Reshape(weight_values(f, weight, scale), [groups, -1, columns])
    product = f.MatMul(f.Transpose(x.wide, perm=[1, 0, 2]), f.Transpose(stacked, perm=[0, 2, 1]))
    return f.join_last(f.Transpose(product, perm=[1, 0, 2]))
