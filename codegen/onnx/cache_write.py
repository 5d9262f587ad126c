"""Write of compressed rows or index keys into a global cache."""

from __future__ import annotations

from v41c.codegen.onnx.body import Body, Term
from v41c.codegen.onnx.formats import write_rows
from v41c.codegen.onnx.rows import store
from v41c.ir.ops.cache_write import CacheWrite


def body(f: Body, op: CacheWrite, cache: Term, x: Term, positions: Term, slots: Term, kept: Term) -> Term:
    """Rows of the tokens that close a group, from `kept` on."""
    position = positions.wide
    closing = f.Equal(position % op.ratio, op.ratio - 1)
    written = f.And(closing, f.GreaterOrEqual(positions, kept))
    return store(f, cache, (slots.wide, position // op.ratio), write_rows(f, x, op.format, cache), written)
