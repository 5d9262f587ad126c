"""Rings: states whose row for a position is the position modulo their length."""

from __future__ import annotations

import triton.language as tl

from v41c.codegen.cuda.language import jit


@jit
def is_newest(
    positions: tl.tensor,
    slots: tl.tensor,
    t: tl.tensor,
    T: tl.tensor,
    position: tl.tensor,
    slot: tl.tensor,
    LENGTH: tl.constexpr,
) -> tl.tensor:
    """Whether no later token of the step overwrites the row of token `t` < T in a ring of LENGTH rows."""
    ahead = t + LENGTH < T
    later_position = tl.load(positions + t + LENGTH, mask=ahead, other=0)
    later_slot = tl.load(slots + t + LENGTH, mask=ahead, other=0)
    return (t + LENGTH >= T) | (later_slot != slot) | (later_position != position + LENGTH)
