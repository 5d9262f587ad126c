"""Rows of the Engram table for the n-grams that end at a token, in exact 64-bit integers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import triton.language as tl

from v41c.codegen.cuda.frame import Arguments, Frame
from v41c.codegen.cuda.kernel import CudaKernel
from v41c.codegen.cuda.language import constant_function, jit
from v41c.codegen.cuda.rows import power_of_two

if TYPE_CHECKING:
    from v41c.ir.ops.engram_hash import EngramHash
    from v41c.ir.types import TensorType
    from v41c.targets.cuda import CudaTarget

#: tokens of a block: with 8 heads, two numbers for each thread of a warp
_TOKENS = 8


def kernel(
    op: EngramHash,
    operands: Sequence[TensorType | None],
    results: Sequence[TensorType],
    target: CudaTarget,
    bounds: Mapping[str, int],
) -> CudaKernel:
    """rows i64 [T, (N − 1) · heads] of ids [T] and history [S, L]."""
    frame = Frame(op, operands, results, bounds)
    tokens = frame.type_of("ids").shape[0]
    heads = len(op.primes) // (len(op.multipliers) - 1)
    arguments: Arguments = {name: frame.operand(name) for name in ("ids", "history", "positions", "slots", "starts")}
    block = min(_TOKENS, power_of_two(frame.bound(tokens)))
    constants: Arguments = {
        "MULTIPLIERS": _text(op.multipliers),
        "PRIMES": _text(op.primes),
        "OFFSETS": _text(op.offsets),
        "PAD": op.pad,
        "GRAMS": len(op.multipliers),
        "LENGTH": int(frame.type_of("history").shape[1]),
        "HEADS": heads,
        "BH": power_of_two(heads),
        "BT": block,
    }
    arguments |= {"rows": frame.result(0), "T": frame.extent(tokens)}
    frame.launch(hash_tokens, arguments | constants, (frame.tiles(tokens, block),), warps=1)
    return frame.kernel()


def _text(numbers: Sequence[int]) -> str:
    """Integers of any size as one constant."""
    return " ".join(map(str, numbers))


@constant_function
def _number(text: str, index: int) -> int:
    return int(text.split(" ")[index])


@jit
def _spread(text: tl.constexpr, FIRST: tl.constexpr, HEADS: tl.constexpr, BH: tl.constexpr) -> tl.tensor:
    """i64 [BH]: numbers FIRST … of a text; 1 beyond HEADS."""
    head = tl.arange(0, BH)
    numbers = tl.full((BH,), 1, tl.int64)
    for index in tl.static_range(HEADS):
        numbers = tl.where(head == index, tl.full((BH,), _number(text, FIRST + index), tl.int64), numbers)
    return numbers


@jit
def hash_tokens(
    ids: tl.tensor,
    history: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    starts: tl.tensor,
    rows: tl.tensor,
    T: tl.tensor,
    MULTIPLIERS: tl.constexpr,
    PRIMES: tl.constexpr,
    OFFSETS: tl.constexpr,
    PAD: tl.constexpr,
    GRAMS: tl.constexpr,
    LENGTH: tl.constexpr,
    HEADS: tl.constexpr,
    BH: tl.constexpr,
    BT: tl.constexpr,
) -> None:
    """All heads of all n-grams of BT tokens."""
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    inside = t < T
    head = tl.arange(0, BH)
    position = tl.load(positions + t, mask=inside, other=0)
    slot = tl.load(slots + t, mask=inside, other=0).to(tl.int64)
    start = tl.load(starts + t, mask=inside, other=0)
    cut = position < 0
    mixed = tl.zeros((BT,), tl.int64)
    for back in tl.static_range(GRAMS):
        before = position - back
        cut = cut | (before < 0)
        here = t - back >= start
        token = tl.load(ids + t - back, mask=inside & here, other=0)
        place = slot * LENGTH + tl.maximum(before, 0) % LENGTH
        old = tl.load(history + place, mask=inside & (before >= 0) & (t - back < start), other=0)
        token = tl.where(here, token, old)
        cut = cut | (token < 0)
        token = tl.where(cut, PAD, token).to(tl.int64)
        mixed = mixed ^ (token * tl.full((BT,), _number(MULTIPLIERS, back), tl.int64))
        if back > 0:
            prime = _spread(PRIMES, (back - 1) * HEADS, HEADS, BH)[None, :]
            row = mixed[:, None] % prime
            row = tl.where(row < 0, row + prime, row) + _spread(OFFSETS, (back - 1) * HEADS, HEADS, BH)[None, :]
            place = t[:, None] * ((GRAMS - 1) * HEADS) + (back - 1) * HEADS + head[None, :]
            tl.store(rows + place, row, mask=inside[:, None] & (head[None, :] < HEADS))
