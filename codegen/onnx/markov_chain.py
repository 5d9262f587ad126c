"""Sequential draft tokens from parallel logits: a Scan over the tokens."""

from __future__ import annotations

from v41c.codegen.onnx.body import Body, Term
from v41c.ir.ops.markov_chain import MarkovChain


def body(
    f: Body, op: MarkovChain, logits: Term, tokens: Term, starts: Term, embed: Term, head: Term
) -> tuple[Term, ...]:
    """Each token's input is the draft before it, unless it starts a run."""
    matrix = head.wide
    begins = f.Equal(starts.wide, f.arange(f.Shape(tokens)))

    def step(draft: Term, row: Term, token: Term, begin: Term) -> tuple[Term, ...]:
        given = f.Where(begin, token, draft)
        out = row + f.MatMul(matrix, f.Gather(embed, given).wide)
        best = f.ArgMax(out, axis=0, keepdims=0)
        return best, out, given, best

    _, *results = f.scan(step, [f.term(0)], [logits, tokens.wide, begins])
    return tuple(results)
