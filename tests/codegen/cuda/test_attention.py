"""CUDA kernels of attention against the reference: any cut of a sequence, packed and plain caches, odd sizes.

Tolerance. Weights are rounded to bf16 relative to a running maximum, which tiles of another size or splits shift: two
roundings of 2^-9 of each weight, so at most 2^-8 of the largest value; sums of n terms differ by n · 2^-24 of it. The
result may then round to its neighbour. f32 has the sums alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor

from tests.codegen.cuda.block_order import reverse_blocks
from tests.codegen.cuda.harness import Subject
from tests.codegen.sparse_harness import Operands, reference, rows_of, same
from v41c.ir import formats
from v41c.ir.op import seeded
from v41c.ir.ops.attend import Attend
from v41c.ir.ops.attend_gathered import AttendGathered
from v41c.ir.ops.attention import Attention
from v41c.ir.ops.gather_selected import GatherSelected
from v41c.ir.ops.rope import Rope
from v41c.targets.cuda import SM_89, SM_90


def close(ours: Tensor, theirs: Tensor, values: Tensor) -> None:
    largest = values.float().abs().max().item()
    assert not ours.isnan().any()
    if ours.dtype == torch.bfloat16:
        torch.testing.assert_close(ours, theirs, rtol=2.0**-8, atol=largest * (2.0**-8 + 640 * 2.0**-24))
    else:
        # rounding of exponents, of scores up to 2^4, comes on top of the sums
        torch.testing.assert_close(ours, theirs, rtol=0, atol=largest * (64 + 16) * 2.0**-24)


@dataclass(frozen=True)
class Case:
    """A sequence's shape: f32 caches are exact."""

    tokens: int
    heads: int
    width: int
    window: int
    topk: int
    dtype: torch.dtype

    def inputs(self) -> Operands:
        """Operands of a step of all tokens from position 0 on; states are NaNs wherever nothing was written."""
        normal = seeded(self.tokens + self.heads + self.width)
        count, width, packed = self.tokens, self.width, self.dtype == torch.bfloat16
        kv = normal(count, width).to(self.dtype)
        rows = normal(count, width)
        compressed = self._poison(2, count + 3, formats.pack(rows, "fp4_e4m3_16").shape[1] if packed else width)
        compressed[1, :count] = formats.write_rows(rows, "fp4_e4m3_16", compressed)
        picked = [normal(position + 1).argsort()[: self.topk].sort().values.int() for position in range(count)]
        selection = [torch.cat((row, torch.full((self.topk - len(row),), -1, dtype=torch.int32))) for row in picked]
        return (
            normal(count, self.heads, width).to(self.dtype),
            formats.round_trip(kv, "fp8_e8m0_32") if packed else kv,
            normal(self.heads),
            self._poison(2, self.window, width + width // 32 if packed else width),
            torch.arange(count).int(),
            torch.ones(count).int(),
            torch.zeros(count).int(),
            torch.zeros(count).int(),
            compressed if self.topk else None,
            torch.stack(selection) if self.topk else None,
        )

    def _poison(self, *shape: int) -> Tensor:
        if self.dtype == torch.bfloat16:
            return torch.full(shape, 0xFF, dtype=torch.uint8)
        return torch.full(shape, torch.nan)


CASES = (
    Case(12, 3, 96, 5, 0, torch.bfloat16),
    Case(12, 17, 32, 5, 6, torch.bfloat16),
    Case(12, 2, 40, 5, 6, torch.float32),
)


def rotated(operands: Operands) -> tuple[Attend, Operands]:
    q = operands[0]
    assert q is not None
    angle = seeded(2)(q.shape[0], 3) * 3
    return Attend(q.shape[2] ** -0.5), (*operands[:8], angle.cos(), angle.sin(), *operands[8:])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_any_cut_of_a_sequence(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of all tokens, and steps that read what earlier ones wrote: alike to the reference, rings equal."""
    op, operands = rotated(case.inputs())
    assert operands[1] is not None
    reverse_blocks(monkeypatch)  # in the interpreter's own order later rows come over earlier ones by themselves
    ring, whole = Subject.of(op, operands, SM_90, 512).call(operands)
    expected_ring, expected = reference(op, operands)
    assert same(ring, expected_ring)
    close(whole, expected, operands[1])
    single, few = (Subject.of(op, operands, SM_90, tokens) for tokens in (1, 16))
    window, results = operands[3], []
    for begin, end in ((0, 4), (4, 5), (5, 11), (11, 12)):
        part = list(rows_of(op, operands, slice(begin, end)))
        part[3], part[6] = window, torch.zeros(end - begin).int()
        window, out = (single if end - begin == 1 else few).call(tuple(part))
        results.append(out)
    assert window is not None
    assert same(window, expected_ring)
    close(torch.cat(results), expected, operands[1])


@pytest.mark.parametrize("tokens", [1, 16, 512])
def test_a_token_does_not_depend_on_its_neighbours(tokens: int) -> None:
    """Two sequences in a step give what each gives alone, bit for bit."""
    q, kv, sink, window, *_ = CASES[1].inputs()
    assert q is not None
    assert kv is not None
    assert window is not None
    ring = formats.pack(seeded(1)(*window.shape[:2], 32), "fp8_e8m0_32")
    compressed = formats.pack(seeded(2)(2, 9, 32), "fp4_e4m3_16")
    positions, slots = torch.tensor([7, 8, 20, 21, 22]).int(), torch.tensor([1, 1, 0, 0, 0]).int()
    starts, first = torch.tensor([0, 0, 2, 2, 2]).int(), torch.tensor([0, 0, 19, 19, 19]).int()
    selection = torch.tensor([[0, 3, 8, -1, -1]]).int().repeat(5, 1)
    operands = (q[:5], kv[:5], sink, ring, positions, slots, starts, first, compressed, selection)
    op = Attention(0.2, True)
    subject = Subject.of(op, operands, SM_90, tokens)
    (whole,) = subject.call(operands)
    close(whole, reference(op, operands)[0], kv)
    for rows in (slice(0, 2), slice(2, 5), slice(2, 3)):
        part = list(rows_of(op, operands, rows))
        part[6] = torch.zeros(rows.stop - rows.start).int()
        assert same(subject.call(tuple(part))[0], whole[rows])


@pytest.mark.parametrize("tokens", [16, 512])
def test_drafts_see_their_whole_run_and_the_ring_before(tokens: int) -> None:
    normal = seeded(4)
    counts, begins, slots = (5, 1, 3), (30, 0, 2), (2, 0, 1)
    parts = list(zip(begins, counts, strict=True))
    positions = torch.cat([torch.arange(b, b + n) for b, n in parts]).int()
    starts = torch.tensor([0] * 5 + [5] + [6] * 3).int()
    slot = torch.tensor([s for s, n in zip(slots, counts, strict=True) for _ in range(n)]).int()
    ring = formats.pack(normal(3, 8, 64), "fp8_e8m0_32")
    # the second sequence has no past, the third two positions
    ring[0], ring[1, 2:] = 0xFF, 0xFF
    kv = formats.round_trip(normal(9, 64, dtype="bf16"), "fp8_e8m0_32")
    q = normal(9, 5, 64, dtype="bf16")
    first = torch.zeros(9).int()
    operands = (q, kv, normal(5), ring, positions, slot, starts, first, None, None)
    op = Attention(0.125, False)
    (got,) = Subject.of(op, operands, SM_90, tokens).call(operands)
    close(got, reference(op, operands)[0], kv)


# the exponential of a sink may be infinite, as it is in the reference
@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_extremes() -> None:
    """Sinks that take everything or nothing, scores of thousands, and a token that sees nothing."""
    normal = seeded(5)
    kv = formats.round_trip(normal(4, 64, dtype="bf16") * 200, "fp8_e8m0_32")
    q, sink = normal(4, 3, 64, dtype="bf16") * 10, torch.tensor([-1e4, 3e38, 0.0])
    ring = torch.full((1, 8, 66), 0xFF, dtype=torch.uint8)
    positions, zeros = torch.arange(4).int(), torch.zeros(4).int()
    first = torch.tensor([0, 0, 0, 9]).int()
    operands = (q, kv, sink, ring, positions, zeros, zeros, first, None, None)
    op = Attention(0.125, True)
    for tokens in (16, 512):
        (got,) = Subject.of(op, operands, SM_90, tokens).call(operands)
        close(got, reference(op, operands)[0], kv)
        assert torch.all(got[3] == 0)
        assert torch.all(got[:, 1] == 0)


@pytest.mark.parametrize("tokens", [16, 512])
def test_gathered_rows_are_attended_to_alike(tokens: int) -> None:
    """Rows that were gathered before give the bits of those read from the cache."""
    op, operands = rotated(rows_of(Attention(1.0, True), CASES[1].inputs(), slice(8)))
    *step, compressed, selection = operands
    (rows,) = reference(GatherSelected(32, 37), (compressed, selection, step[5]))
    gathered = (*step, rows, selection)
    ours = Subject.of(AttendGathered(op.scale), gathered, SM_90, tokens).call(gathered)
    for left, right in zip(ours, Subject.of(op, operands, SM_90, tokens).call(operands), strict=True):
        assert same(left, right)


@cache
def long_case() -> tuple[Attention, Operands]:
    """More entries than a tile has, in window and selection, at more heads than a block takes."""
    normal = seeded(7)
    ring = formats.pack(normal(1, 70, 64), "fp8_e8m0_32")
    compressed = formats.pack(normal(1, 150, 64), "fp4_e4m3_16")
    selection = torch.arange(0, 150).int()[None]
    kv = formats.round_trip(normal(1, 64, dtype="bf16"), "fp8_e8m0_32")
    places = (torch.tensor([100]).int(), *(torch.zeros(1).int() for _ in range(3)))
    return Attention(0.125, True), (
        normal(1, 20, 64, dtype="bf16"),
        kv,
        normal(20),
        ring,
        *places,
        compressed,
        selection,
    )


@pytest.mark.parametrize("tokens", [1, 16, 512])
@pytest.mark.parametrize("target", [SM_89, SM_90], ids=lambda target: target.name)
def test_many_entries_over_tiles_and_splits(tokens: int, target: object) -> None:
    op, operands = long_case()
    (got,) = Subject.of(op, operands, target, tokens).call(operands)  # type: ignore[arg-type]  # parametrised
    close(got, reference(op, operands)[0], torch.tensor([4.0]))


def test_rotations_are_those_of_rope() -> None:
    """With one visible key and no sink a result is that key rotated back, whatever the query: exact."""
    kv = formats.round_trip(seeded(8)(1, 64, dtype="bf16"), "fp8_e8m0_32")
    ring = torch.full((1, 8, 66), 0xFF, dtype=torch.uint8)
    angle = seeded(9)(1, 8) * 3
    zero = torch.zeros(1).int()
    operands = (kv[:, None], kv, torch.full((1,), -1e30), ring, zero, zero, zero, zero, angle.cos(), angle.sin())
    _, out = Subject.of(Attend(1.0), (*operands, None, None), SM_90, 1).call((*operands, None, None))
    assert same(out[:, 0], Rope(True).reference(kv, angle.cos(), angle.sin()))
