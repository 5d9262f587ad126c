"""Engram lookups: exact hashes, orders, gates of any width."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.codegen.cuda.harness import Subject
from tests.codegen.sparse_harness import reference, rows_of, same
from v41c.codegen.cuda import kernel_for
from v41c.ir.op import seeded
from v41c.ir.ops.engram_gate import EngramGate
from v41c.ir.ops.engram_hash import EngramHash
from v41c.ir.ops.engram_lookup import EngramLookup
from v41c.ir.ops.engram_lookup_ordered import EngramLookupOrdered
from v41c.ir.ops.sort_rows import SortRows
from v41c.ir.types import DType, TensorType
from v41c.targets.cuda import SM_90

#: the release's first Engram layer
MULTIPLIERS = (76632096046245, 4839876093313, 35959672319349, 73987337458391)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("heads", [1, 3, 8])
@pytest.mark.parametrize("tokens", [0, 1, 3, 17])
def test_hashes_are_exact(tokens: int, heads: int) -> None:
    """Products of 63 bits, primes of 24, sequences that begin in the step and before it, images, unused history."""
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(0, 99092, (tokens,), generator=generator).int()
    ids[2::7] = -1
    history = torch.randint(0, 99092, (2, 3), generator=generator).int()
    history[1] = -(2**31)  # never written: its sequence starts in this step
    starts = ints(*[0] * min(tokens, 5), *[5] * max(tokens - 5, 0))
    positions = torch.arange(tokens).int() - starts + ints(*[40] * min(tokens, 5), *[0] * max(tokens - 5, 0))
    slots = (starts > 0).int()
    primes = tuple(16000057 + 2 * index for index in range(3 * heads))
    op = EngramHash(MULTIPLIERS, primes, tuple(16000000 * index for index in range(3 * heads)), 2)
    operands = (ids, history, positions, slots, starts)
    (rows,) = Subject.of(op, operands, SM_90, 512).call(operands)
    assert same(rows, reference(op, operands)[0])


def test_products_of_any_sign() -> None:
    """Multipliers that overflow: remainders are of the prime's sign, as PyTorch's."""
    op = EngramHash((2**62 + 1, 2**61 + 3), (97, 89), (0, 97), 3)
    operands = (ints(5, 77, 1234), ints(9, 8).view(2, 1), ints(3, 4, 5), ints(1, 1, 1), ints(0, 0, 0))
    (rows,) = Subject.of(op, operands, SM_90, 16).call(operands)
    assert same(rows, reference(op, operands)[0])


def test_constants_are_integers_of_64_bits() -> None:
    """No float on the way: multipliers beyond 2^53 stand in the constants digit by digit."""
    odd = 2**62 + 12345
    i32 = TensorType(DType.I32, ("T",))
    types = (i32, TensorType(DType.I32, ("S", 1)), i32, i32, i32)
    op = EngramHash((odd, odd - 2), (97,), (0,), 2)
    kernel = kernel_for(op, types, op.infer_results(types), SM_90, {"T": 1, "S": 1})
    assert kernel.launches[0].function.constants["MULTIPLIERS"] == f"{odd} {odd - 2}"


@pytest.mark.parametrize("tokens", [1, 3, 17])
def test_rows_are_sorted_and_looked_up_in_order(tokens: int) -> None:
    """Equal rows keep their order; an ordered lookup puts the same values where an unordered one does."""
    normal = seeded(tokens)
    rows = (normal(tokens, 5) * 4).long() + 2**40
    sort = SortRows()
    ordered, places = Subject.of(sort, (rows, None, None), SM_90, 512).call((rows, None, None))
    expected = reference(sort, (rows, None, None))
    assert same(ordered, expected[0])
    assert same(places, expected[1])
    table = (normal(40, 96) * 60).to(torch.float8_e4m3fn)
    scale = (normal(40, 3) * 4 + 118).to(torch.uint8).view(torch.float8_e8m0fnu)
    near = (ordered - 2**40 + 20, places, table, scale)
    plain = (rows - 2**40 + 20, table, scale)
    (ours,) = Subject.of(EngramLookupOrdered("bf16"), near, SM_90, 512).call(near)
    assert same(ours, reference(EngramLookup("bf16"), plain)[0])


@pytest.mark.parametrize(("copies", "width"), [(4, 33), (1, 8), (3, 8200)])
def test_gates(copies: int, width: int) -> None:
    """Rows of one step and of two. x + g·v rounds numbers that differ by a few 2^-24: a neighbour at most."""
    normal = seeded(width)
    stream, kv = normal(3, copies, width, dtype="bf16"), normal(3, (copies + 1) * width, dtype="bf16")
    q, k = normal(copies, width, dtype="bf16"), normal(copies, width, dtype="bf16")
    operands = (stream, kv, q, k, torch.tensor([False, True, False]))
    op = EngramGate(1e-20)
    subject = Subject.of(op, operands, SM_90, 16)
    (ours,) = subject.call(operands)
    (theirs,) = reference(op, operands)
    torch.testing.assert_close(ours, theirs, rtol=2.0**-7, atol=2.0**-20)
    assert same(ours[1], stream[1]), "an image's token gets nothing"
    assert same(subject.call(rows_of(op, operands, [2]))[0], ours[2:])


def test_a_gate_keeps_the_sign_of_zero() -> None:
    """s is 0, and -0 where a negative dot product is divided until nothing is left: the root is that of ±1e-6."""
    ones, gates = torch.ones(1, 4), []
    stream = torch.tensor([[[1.0, 0, 0, 0]]])
    kv = torch.tensor([[1e3, 1e8, 1e8, 1e8, 2, 2, 2, 2]])
    for sign in (1.0, -1.0):
        operands = (stream, kv, sign * 1e-22 * ones, 1e-22 * ones, None)
        op = EngramGate(1e-20)
        (ours,) = Subject.of(op, operands, SM_90, 1).call(operands)
        torch.testing.assert_close(ours, reference(op, operands)[0], rtol=2.0**-22, atol=0.0)
        gates.append(float(ours[0, 0, 1]) / 2)
    assert gates == pytest.approx([torch.sigmoid(torch.tensor(sign * 1e-3)).item() for sign in (1, -1)], rel=1e-6)
