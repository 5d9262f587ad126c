"""Embeddings of the positions of an image's span."""

from __future__ import annotations

from v41c.codegen.onnx.body import Body, Term
from v41c.ir.ops.place_images import PlaceImages


def body(
    f: Body, op: PlaceImages, x: Term, image_rows: Term, image_values: Term, start: Term, newline: Term, end: Term
) -> Term:
    """Codes pick one of five; rows that nothing points at may hold NaN and are not touched."""
    codes = f.column(image_rows.wide)
    seen = f.GatherND(image_values.wide, f.Max(codes, 0))
    out = f.Where(codes >= 0, seen, x.wide)
    for code, delimiter in ((-2, start), (-3, newline), (-4, end)):
        out = f.Where(f.Equal(codes, code), delimiter.wide, out)
    return out.to(x.dtype)
