"""Rows of the Engram table for the n-grams that end at a token, in exact 64-bit integers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tvm.script.ir_builder import tirx as T

from v41c.codegen.cpu.frame import Body, build_kernel
from v41c.codegen.cpu.sparse import Types, required
from v41c.codegen.cpu.tir import cast, let, local, loop, put
from v41c.codegen.kernel import CpuKernel
from v41c.ir.ops.engram_hash import EngramHash
from v41c.ir.types import TensorType

if TYPE_CHECKING:
    from v41c.targets.target import CpuTarget


def kernel(
    op: EngramHash, operands: Types, results: tuple[TensorType, ...], target: CpuTarget, bounds: Mapping[str, int]
) -> CpuKernel:
    """The kernel."""
    kind, ring = required(operands, 0, 1)
    length = int(ring.shape[1])
    grams = len(op.multipliers)
    heads = len(op.primes) // (grams - 1)

    def emit(body: Body) -> None:
        (ids, history, positions, slots, starts), (out,) = body.operands, body.results
        with loop(body.size(kind.shape[0])) as row:
            first = let(cast(slots[row], "int64") * length)
            position = let(cast(positions[row], "int64"))
            start = let(cast(starts[row], "int64"))
            cut = local(T.int32(0))
            total = local(T.int64(0))
            for back in range(grams):
                # before the sequence's start nothing is read: T.if_then_else branches
                place = first + T.max(position - back, T.int64(0)) % length
                older = T.if_then_else(row - back >= start, ids[T.max(row - back, T.int64(0))], history[place])
                token = let(T.if_then_else(position >= back, older, T.int32(-1)))
                cut.set(T.Select(token < 0, T.int32(1), cut.value))
                factor = T.Select(cut.value == 1, T.int64(op.pad), cast(token, "int64"))
                total.set(T.bitwise_xor(total.value, factor * T.int64(op.multipliers[back])))
                for head in range(heads if back else 0):
                    index = (back - 1) * heads + head
                    value = T.floormod(total.value, T.int64(op.primes[index])) + T.int64(op.offsets[index])
                    put(out, row * len(op.primes) + index, value)

    return build_kernel(emit, op, operands, results, bounds)
