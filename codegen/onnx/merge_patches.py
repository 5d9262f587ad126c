"""Patches side by side."""

from __future__ import annotations

from v41c.codegen.onnx.body import Body, Term
from v41c.ir.ops.merge_patches import MergePatches


def body(f: Body, op: MergePatches, x: Term, sources: Term) -> Term:
    """As stored; a row of zeros behind the patches is what −1 means."""
    padded = f.Pad(x.wide, [0, 0, 1, 0], 0.0)
    places = f.Where(sources.wide < 0, f.Shape(x, end=1), sources.wide)
    return f.join_last(f.Transpose(f.Gather(padded, places), perm=[0, 2, 1])).to(x.dtype)
