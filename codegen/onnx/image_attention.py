"""Attention of every patch to all patches of its image, in blocks with a running maximum: a Scan over the blocks."""

from __future__ import annotations

import math

from v41c.codegen.onnx.body import Body, Term
from v41c.ir.ops.image_attention import BLOCK, ImageAttention


def body(f: Body, op: ImageAttention, qkv: Term, begins: Term, ends: Term) -> Term:
    """The keys of each patch's image are gathered block by block."""
    third, width = int(qkv.shape[1]) // 3, int(qkv.shape[2])
    q, k, v = f.many("Split", 3, qkv.wide, [third] * 3, axis=1)
    tokens = f.Shape(qkv, end=1)
    begin, end = f.column(begins.wide), f.column(f.Min(ends.wide, tokens))
    longest = f.ReduceMax(f.Concat(f.Reshape(end - begin, [-1]), [1], axis=0), keepdims=0)
    blocks = f.Reshape((longest + (BLOCK - 1)) // BLOCK, [1])
    query = f.Unsqueeze(q, [2])

    def step(maximum: Term, total: Term, acc: Term, block: Term) -> tuple[Term, ...]:
        key = begin + block * BLOCK + f.arange(f.term([BLOCK]))
        seen = key < end
        place = f.Where(seen, key, begin)
        keys, values = (f.Transpose(f.Gather(part, place), perm=[0, 2, 1, 3]) for part in (k, v))
        scores = f.MatMul(query, f.Transpose(keys, perm=[0, 1, 3, 2])) * op.scale
        scores = f.Where(f.Unsqueeze(seen, [1, 2]), scores, -math.inf)
        new = f.Max(maximum, f.ReduceMax(scores, [-1], keepdims=1))
        shift = f.Where(f.Equal(new, -math.inf), 0.0, new)
        decay, p = f.Exp(maximum - shift), f.Exp(scores - shift)
        total = total * decay + f.ReduceSum(p, [-1], keepdims=1)
        return new, total, acc * decay + f.MatMul(p.to(qkv.dtype).wide, values)

    states = [
        f.full(-math.inf, tokens, [third, 1, 1]),
        f.full(0.0, tokens, [third, 1, 1]),
        f.full(0.0, tokens, [third, 1, width]),
    ]
    _, total, acc = f.scan(step, states, [f.arange(blocks)])
    return f.Squeeze(acc / total, [2])
