"""Sequential draft tokens: a launch for each place in a run, over blocks of the vocabulary.

Every launch takes the rows that lie as far behind their run's start as launches came before it. A block multiplies its
rows of the head with each of theirs, and keeps the best of its tokens; the last block to finish compares the blocks.
What runs have beyond the last launch, far more tokens than are ever drafted, one block takes row by row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import triton.language as tl

from v41c.codegen.cuda.frame import Frame
from v41c.codegen.cuda.kernel import CudaKernel
from v41c.codegen.cuda.language import jit
from v41c.codegen.cuda.rows import power_of_two
from v41c.ir.op import Op
from v41c.ir.types import TensorType
from v41c.targets.cuda import CudaTarget

#: elements of the head that a block keeps: 64 a thread of 8 warps; a release's 129,280 x 256 make 2,020 blocks
_ELEMENTS = 16384
#: results of blocks that are compared at a time
_COMPARED = 2048
#: rows of a run that have a launch of their own
_DEPTHS = 16


def kernel(
    op: Op,
    operands: Sequence[TensorType | None],
    results: Sequence[TensorType],
    target: CudaTarget,
    bounds: Mapping[str, int],
) -> CudaKernel:
    """logits [T, V], tokens and starts [T], embed and head [V, R] to logits, inputs and drafts."""
    frame = Frame(op, operands, results, bounds)
    rows, vocabulary = frame.type_of("logits").shape
    rank = int(frame.type_of("head").shape[1])
    bound = frame.bound(rows)
    block = max(1, min(power_of_two(int(vocabulary)), _ELEMENTS // power_of_two(rank)))
    blocks = -(-int(vocabulary) // block)
    arguments = (
        {name: frame.operand(name) for name in ("logits", "tokens", "starts", "embed", "head")}
        | {"out": frame.result(0), "inputs": frame.result(1), "drafts": frame.result(2)}
        | {"values": frame.workspace(bound * blocks, "fp32"), "numbers": frame.workspace(bound * blocks, "i32")}
        | {"counters": frame.counters(2), "T": frame.extent(rows), "VOCABULARY": int(vocabulary), "RANK": rank}
        | {"BT": power_of_two(bound), "BV": block, "BR": power_of_two(rank), "BLOCKS": blocks}
        | {"COMPARED": min(_COMPARED, power_of_two(blocks))}
    )
    depths = min(bound, _DEPTHS)
    for depth in range(depths):
        # no block at all in an empty step, which would leave the count of launches behind
        grid = (frame.tiles(rows, bound, blocks),)
        frame.launch(chain_block, arguments | {"LAST": depth == bound - 1}, grid, warps=8)
    if bound > depths:
        used = ("logits", "starts", "embed", "head", "out", "inputs", "drafts", "counters", "T")
        rest = {name: arguments[name] for name in (*used, "VOCABULARY", "RANK", "BV", "BR")}
        frame.launch(chain_rest, rest | {"DEPTHS": depths}, (frame.tiles(rows, bound),), warps=8)
    return frame.kernel()


@jit
def chain_block(
    logits: tl.tensor,
    tokens: tl.tensor,
    starts: tl.tensor,
    embed: tl.tensor,
    head: tl.tensor,
    out: tl.tensor,
    inputs: tl.tensor,
    drafts: tl.tensor,
    values: tl.tensor,
    numbers: tl.tensor,
    counters: tl.tensor,
    T: tl.tensor,
    VOCABULARY: tl.constexpr,
    RANK: tl.constexpr,
    BT: tl.constexpr,
    BV: tl.constexpr,
    BR: tl.constexpr,
    BLOCKS: tl.constexpr,
    COMPARED: tl.constexpr,
    LAST: tl.constexpr,
) -> None:
    """BV tokens of the vocabulary for every row of this launch's depth; `counters`: blocks that finished, depth."""
    block = tl.program_id(0)
    depth = tl.load(counters + 1)
    row = tl.arange(0, BT)
    own = (row < T) & (row - tl.load(starts + row, mask=row < T, other=0) == depth)
    count = tl.sum(own.to(tl.int32), axis=0)
    if count > 0:
        token = block * BV + tl.arange(0, BV)
        weight = _head_rows(head, token, VOCABULARY, RANK, BR)
        for t in range(T):
            start = tl.load(starts + t)
            if t - start == depth:
                entered = tl.load(tokens + t)
                if depth > 0:
                    entered = tl.load(drafts + t - 1)
                if block == 0:
                    tl.store(inputs + t, entered)
                first = (start + depth).to(tl.int64) * VOCABULARY
                total = _biased(logits + first, out + first, embed, entered, weight, token, VOCABULARY, RANK, BR)
                best = tl.max(total, axis=0)
                reached = (total == best) & (token < VOCABULARY)
                tl.store(values + t * BLOCKS + block, best)
                tl.store(numbers + t * BLOCKS + block, tl.min(tl.where(reached, token, VOCABULARY), axis=0))
    # every thread's stores come before the count, and other blocks' stores before what is read after it
    tl.debug_barrier()
    finished = tl.atomic_add(counters, 1, sem="acq_rel", scope="gpu")
    if finished == BLOCKS - 1:
        tl.store(counters, 0)
        tl.store(counters + 1, 0 if LAST else depth + 1)
        if count > 0:
            for t in range(T):
                if t - tl.load(starts + t) == depth:
                    tl.store(drafts + t, _first_best(values + t * BLOCKS, numbers + t * BLOCKS, BLOCKS, COMPARED))


@jit
def _first_best(values: tl.tensor, numbers: tl.tensor, BLOCKS: tl.constexpr, COMPARED: tl.constexpr) -> tl.tensor:
    """The number beside the largest value, the least of them where values are equal."""
    highest = tl.max(tl.full((COMPARED,), float("-inf"), tl.float32), axis=0)
    lowest = tl.min(tl.full((COMPARED,), 0, tl.int32), axis=0)
    for first in range(0, BLOCKS, COMPARED):
        place = first + tl.arange(0, COMPARED)
        value = tl.load(values + place, mask=place < BLOCKS, other=float("-inf"), cache_modifier=".cg")
        number = tl.load(numbers + place, mask=place < BLOCKS, other=0x7FFFFFFF, cache_modifier=".cg")
        best = tl.max(value, axis=0)
        token = tl.min(tl.where(value == best, number, 0x7FFFFFFF), axis=0)
        # blocks come in ascending order of their tokens
        lowest = tl.where(best > highest, token, lowest)
        highest = tl.maximum(best, highest)
    return lowest


@jit
def _head_rows(
    head: tl.tensor, token: tl.tensor, VOCABULARY: tl.constexpr, RANK: tl.constexpr, BR: tl.constexpr
) -> tl.tensor:
    rank = tl.arange(0, BR)
    place = token[:, None].to(tl.int64) * RANK + rank[None, :]
    return tl.load(head + place, mask=(token[:, None] < VOCABULARY) & (rank[None, :] < RANK), other=0.0)


@jit
def _biased(
    logits: tl.tensor,
    out: tl.tensor,
    embed: tl.tensor,
    entered: tl.tensor,
    weight: tl.tensor,
    token: tl.tensor,
    VOCABULARY: tl.constexpr,
    RANK: tl.constexpr,
    BR: tl.constexpr,
) -> tl.tensor:
    """Store a row's logits of some tokens plus their bias, rows of the head times the embedding of what was entered."""
    rank = tl.arange(0, BR)
    factors = tl.load(embed + entered.to(tl.int64) * RANK + rank, mask=rank < RANK, other=0.0).to(tl.float32)
    bias = tl.sum(weight.to(tl.float32) * factors[None, :], axis=1)
    total = tl.load(logits + token, mask=token < VOCABULARY, other=float("-inf")) + bias
    tl.store(out + token, total, mask=token < VOCABULARY)
    return total


@jit
def chain_rest(
    logits: tl.tensor,
    starts: tl.tensor,
    embed: tl.tensor,
    head: tl.tensor,
    out: tl.tensor,
    inputs: tl.tensor,
    drafts: tl.tensor,
    counters: tl.tensor,
    T: tl.tensor,
    VOCABULARY: tl.constexpr,
    RANK: tl.constexpr,
    BV: tl.constexpr,
    BR: tl.constexpr,
    DEPTHS: tl.constexpr,
) -> None:
    """Rows at least DEPTHS behind their run's start, in order, by one block."""
    tl.store(counters + 1, 0)
    for t in range(T):
        start = tl.load(starts + t)
        if t - start >= DEPTHS:
            # the row before was written by this block
            tl.debug_barrier()
            entered = tl.load(drafts + t - 1, cache_modifier=".cg")
            tl.store(inputs + t, entered)
            row = (entered * 0 + t).to(tl.int64) * VOCABULARY
            highest = tl.max(tl.full((BV,), float("-inf"), tl.float32), axis=0)
            chosen = entered * 0
            for first in range(0, VOCABULARY, BV):
                token = first + tl.arange(0, BV)
                weight = _head_rows(head, token, VOCABULARY, RANK, BR)
                total = _biased(logits + row, out + row, embed, entered, weight, token, VOCABULARY, RANK, BR)
                best = tl.max(total, axis=0)
                number = tl.min(tl.where((total == best) & (token < VOCABULARY), token, VOCABULARY), axis=0)
                chosen = tl.where(best > highest, number, chosen)
                highest = tl.maximum(best, highest)
            tl.store(drafts + t, chosen)
