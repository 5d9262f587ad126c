"""Choice of the k best of a stream of scored ids, in memory that does not depend on the length of the stream."""

from __future__ import annotations

from collections.abc import Callable

from tvm.script.ir_builder import tirx as T

from v41c.codegen.cpu.index_scores import IndexScores
from v41c.codegen.cpu.sparse import array, round_up
from v41c.codegen.cpu.tir import (
    LANES,
    Buffer,
    Expr,
    Local,
    at,
    bits,
    cast,
    i64,
    iconst,
    lanes_of,
    let,
    local,
    loop,
    mask,
    put,
    select,
    shr,
    splat,
    when,
)

LOWEST = -(1 << 31)  # order key below that of every score
UNRANKED = -1  # bits of the f32, a NaN, whose order key that is: a row with this score is never chosen


def order_keys(scores: Expr) -> Expr:
    """int32 that compare as f32 scores do, −0 equal to +0."""
    lanes = lanes_of(scores)
    word = let(bits(scores))
    word = let(select(word == iconst(LOWEST, lanes), iconst(0, lanes), word))
    return T.bitwise_xor(word, mask(shr(word, 31), 0x7FFFFFFF))


class Selection:
    """The `keep` best (key, id) pairs pushed so far, among some worse ones, ids ascending.

    Ids must be pushed in ascending order; of equal keys the lower id is better. A push that can no longer be among the
    best costs one comparison with the worst key of the last pruning.
    """

    def __init__(self, integers: Buffer, base: Expr, keep: int) -> None:
        self.keep = keep
        self.memory = integers
        self.keys = base
        self.ids = base + _room(keep)
        self.count = local(T.int64(0))
        self.threshold = local(T.int32(LOWEST))

    @staticmethod
    def words(keep: int) -> int:
        """Words of memory at `base`."""
        return 2 * _room(keep)

    def reset(self) -> None:
        """Forget everything."""
        self.count.set(T.int64(0))
        self.threshold.set(T.int32(LOWEST))

    def reserve(self, pushes: int) -> None:
        """Make room for up to 64 more."""
        with when(self.count.value > _room(self.keep) - LANES - pushes):
            self.prune()

    def push(self, key: Expr, number: Expr) -> None:
        """Offer one id; room must have been reserved."""
        put(self.memory, self.keys + self.count.value, key)
        put(self.memory, self.ids + self.count.value, number)
        self.count.set(self.count.value + cast(key > self.threshold.value, "int64"))

    def prune(self) -> None:
        """Drop all but the `keep` best."""
        prune(self.memory, self.keys, self.ids, self.count, self.keep, self.threshold)

    def finish(self) -> None:
        """Leave exactly the best."""
        with when(self.count.value > self.keep):
            self.prune()


def push_tile(best: Selection, scores: IndexScores, count: Expr) -> None:
    """Offer the rows of a scored tile, the first `count` of its places."""
    best.reserve(scores.tile)
    keys = array(scores.tile, "int32")
    highest = None
    for part in range(0, scores.tile, LANES):
        place = T.ramp(T.int32(part), T.int32(1), LANES)
        shown = place < T.broadcast(cast(count, "int32"), LANES)
        key = let(select(shown, order_keys(scores.scores[at(part, LANES)]), iconst(LOWEST, LANES)))
        put(keys, i64(part), key)
        highest = key if highest is None else T.max(highest, key)
    best_here = T.call_llvm_pure_intrin("int32", "llvm.vector.reduce.smax", highest)
    with when(best_here > best.threshold.value), loop(scores.tile) as place:
        best.push(keys[place], scores.row(place))


def _room(keep: int) -> int:
    # between two prunings at least 256 pushes pass, so that pruning costs little even for a small `keep`
    return round_up(keep + max(keep, 256) + 64) + LANES


def prune(memory: Buffer, keys: Expr, ids: Expr, count: Local, keep: int, threshold: Local) -> None:
    """Keep the `keep` best of `count` pairs in place, ties to the earlier; `threshold` becomes the worst key kept.

    `count` ≥ `keep`; the keys have room for 16 more. The worst key is the largest that at least `keep` keys reach,
    found bit by bit from the top.
    """
    put(memory, keys + count.value, iconst(LOWEST, LANES))
    vectors = let((count.value + (LANES - 1)) // i64(LANES))

    def how_many(condition: Callable[[Expr], Expr]) -> Expr:
        total = local(iconst(0, LANES))
        with loop(vectors) as i:
            total.set(total.value + cast(condition(memory[at(keys + i * LANES, LANES)]), "int32"))
        return T.call_llvm_pure_intrin("int32", "llvm.vector.reduce.add", total.value)

    worst = local(T.int32(LOWEST))
    bit = local(iconst(1 << 31))
    with loop(32):
        # in signed order, setting the top bit of the unsigned key clears the sign
        candidate = let(T.bitwise_xor(worst.value, bit.value))
        reached = let(how_many(lambda values: values >= splat(candidate, LANES)))
        worst.set(select(reached >= keep, candidate, worst.value))
        bit.set(mask(shr(bit.value, 1), 0x7FFFFFFF))
    equal_left = local(T.int32(keep) - let(how_many(lambda values: values > splat(worst.value, LANES))))
    kept = local(T.int64(0))
    with loop(count.value) as i:
        key, number = let(memory[keys + i]), let(memory[ids + i])
        put(memory, keys + kept.value, key)
        put(memory, ids + kept.value, number)
        equal = let(cast(T.And(key == worst.value, equal_left.value > 0), "int32"))
        equal_left.set(equal_left.value - equal)
        kept.set(kept.value + cast(equal + cast(key > worst.value, "int32"), "int64"))
    count.set(kept.value)
    threshold.set(worst.value)
