"""Pooling of groups of tokens, and the write of their parts for later steps: a block per token and span of channels.

One launch reads and writes the state. A run's first group may have members of earlier steps; the token that closes it
reads them, and writes the rows that the run's later tokens would put in their places, after reading.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import triton.language as tl

from v41c.codegen.cuda.frame import Frame
from v41c.codegen.cuda.kernel import CudaKernel
from v41c.codegen.cuda.language import jit
from v41c.codegen.cuda.rings import is_newest
from v41c.codegen.cuda.rows import power_of_two
from v41c.ir.op import Op
from v41c.ir.types import TensorType
from v41c.targets.cuda import CudaTarget

#: channels of a block: four a thread, 16 bytes of f32
_CHANNELS = 512


def kernel(
    op: Op,
    operands: Sequence[TensorType | None],
    results: Sequence[TensorType],
    target: CudaTarget,
    bounds: Mapping[str, int],
) -> CudaKernel:
    """k and gate f32 [T, HD] and partial f32 [S, L, 2, HD] to pooled [T, HD]."""
    frame = Frame(op, operands, results, bounds)
    tokens, width = frame.type_of("k").shape
    block = min(_CHANNELS, power_of_two(int(width)))
    frame.launch(
        compress_pool_token,
        {name: frame.operand(name) for name in ("partial", "k", "gate", "positions", "slots", "starts")}
        | {"pooled": frame.result(0), "T": frame.extent(tokens), "RATIO": int(op.attributes()["ratio"])}
        | {"LENGTH": int(frame.type_of("partial").shape[1]), "WIDTH": int(width), "BLOCK": block}
        | {"TOKENS": power_of_two(frame.bound(tokens))},
        (frame.tiles(tokens), -(-int(width) // block)),
    )
    return frame.kernel()


@jit
def compress_pool_token(
    partial: tl.tensor,
    k: tl.tensor,
    gate: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    starts: tl.tensor,
    pooled: tl.tensor,
    T: tl.tensor,
    RATIO: tl.constexpr,
    LENGTH: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
) -> None:
    """One token: its pooled row, or zeros, and the rows of the state that are its to write."""
    t = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < WIDTH
    position = tl.load(positions + t)
    slot = tl.load(slots + t)
    start = tl.load(starts + t)
    state = partial + slot.to(tl.int64) * (LENGTH * 2 * WIDTH) + channel
    # how many rows of the state the run's first group needs, from which position on, and the token that closes it
    held = tl.load(positions + start) % RATIO
    oldest = tl.load(positions + start) - held
    closer = start + RATIO - 1 - held
    result = tl.zeros((BLOCK,), tl.float32)
    if position % RATIO == RATIO - 1:
        result = _pooled(state, k + channel, gate + channel, t, position, start, inside, RATIO, LENGTH, WIDTH)
        if t == closer:
            tl.debug_barrier()
            rows = tl.arange(0, TOKENS)
            members = tl.load(starts + rows, mask=rows < T, other=-1) == start
            last = tl.max(tl.where(members, rows, -1), axis=0)
            for needed in range(0, held):
                # the last row of the run at this place; none behind the closing token has an earlier one
                place = (oldest + needed) % LENGTH
                row = last - (tl.load(positions + last) - oldest - needed) % LENGTH
                _write_part(state, k + channel, gate + channel, row, place, inside & (row > t), WIDTH)
    tl.store(pooled + t.to(tl.int64) * WIDTH + channel, result.to(pooled.dtype.element_ty), mask=inside)
    own = (position - oldest) % LENGTH >= held
    written = inside & is_newest(positions, slots, t, T, position, slot, LENGTH) & own
    _write_part(state, k + channel, gate + channel, t, position % LENGTH, written, WIDTH)


@jit
def _pooled(
    state: tl.tensor,
    k: tl.tensor,
    gate: tl.tensor,
    t: tl.tensor,
    position: tl.tensor,
    start: tl.tensor,
    inside: tl.tensor,
    RATIO: tl.constexpr,
    LENGTH: tl.constexpr,
    WIDTH: tl.constexpr,
) -> tl.tensor:
    """f32 [BLOCK] of the group that token t closes."""
    highest = tl.full((inside.shape[0],), float("-inf"), tl.float32)
    for back in tl.static_range(RATIO - 1, -1, -1):
        own = t - back >= start
        held = state + (position - back) % LENGTH * (2 * WIDTH)
        value = _part(gate, held + WIDTH, t - back, own, inside, WIDTH)
        highest = tl.maximum(highest, value)
    total = tl.zeros((inside.shape[0],), tl.float32)
    weighted = tl.zeros((inside.shape[0],), tl.float32)
    for back in tl.static_range(RATIO - 1, -1, -1):
        own = t - back >= start
        held = state + (position - back) % LENGTH * (2 * WIDTH)
        weight = tl.exp(_part(gate, held + WIDTH, t - back, own, inside, WIDTH) - highest)
        total += weight
        weighted += weight * _part(k, held, t - back, own, inside, WIDTH)
    return tl.math.div_rn(weighted, total)


@jit
def _part(
    source: tl.tensor, state: tl.tensor, member: tl.tensor, own: tl.tensor, inside: tl.tensor, WIDTH: tl.constexpr
) -> tl.tensor:
    """A group member's channels: a row of the step, or of the state."""
    row = tl.load(source + member.to(tl.int64) * WIDTH, mask=inside & own, other=0.0)
    return tl.where(own, row, tl.load(state, mask=inside & (own == 0), other=0.0))


@jit
def _write_part(
    state: tl.tensor,
    k: tl.tensor,
    gate: tl.tensor,
    row: tl.tensor,
    place: tl.tensor,
    written: tl.tensor,
    WIDTH: tl.constexpr,
) -> None:
    offset, held = row.to(tl.int64) * WIDTH, state + place * (2 * WIDTH)
    tl.store(held, tl.load(k + offset, mask=written, other=0.0), mask=written)
    tl.store(held + WIDTH, tl.load(gate + offset, mask=written, other=0.0), mask=written)
