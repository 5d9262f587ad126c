"""CUDA kernels that choose rows and blocks: equal to the reference, ties included, wherever scores are exact."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.codegen.cuda.harness import Subject
from tests.codegen.sparse_harness import Operands, exact_index, reference, rows_of, same
from v41c.ir import formats
from v41c.ir.op import Op, seeded
from v41c.ir.ops.candidate_blocks import CandidateBlocks
from v41c.ir.ops.index_candidates import IndexCandidates
from v41c.ir.ops.index_topk import IndexTopk
from v41c.targets.cuda import SM_89, SM_90


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def cases() -> Iterator[tuple[Op, Operands]]:
    """Widths whose rows are whole words and others, blocks that are powers of two and others, few and many places."""
    for heads, width, count, topk, block in ((5, 32, 300, 40, 8), (32, 128, 270, 64, 5)):
        q, weights, keys = exact_index(6, heads, width, count)
        positions = ints(count - 1, 2, topk - 1, count // 2, topk, count - 3)
        pool = torch.full((6, 30), -1, dtype=torch.int32)
        for row in range(6):
            blocks = int(positions[row]) // block + 1
            chosen = torch.randperm(blocks, generator=torch.Generator().manual_seed(row))[:30].sort().values
            pool[row, : len(chosen)] = chosen.int()
        base = (q, weights, keys, positions, ints(0, 1, 0, 1, 1, 1))
        yield IndexTopk(1, topk, 0.25, block), (*base, None)
        yield IndexTopk(1, topk, 0.25, block), (*base, pool)
        yield IndexCandidates(1, topk, 0.25, block), (*base, pool)
        yield CandidateBlocks(1, 30, block, 0.25), base
    yield IndexTopk(2, count + 50, 0.25, block), (*base, None)


CASES = list(cases())


@pytest.mark.parametrize("number", range(len(CASES)))
def test_selection_is_exact_whatever_the_cut(number: int) -> None:
    op, operands = CASES[number]
    expected = reference(op, operands)[0]
    assert same(Subject.of(op, operands, SM_90, 512).call(operands)[0], expected)
    few, single = (Subject.of(op, operands, SM_90, tokens) for tokens in (16, 1))
    assert same(few.call(rows_of(op, operands, slice(0, 3)))[0], expected[:3])
    for row in (0, 3):
        assert same(single.call(rows_of(op, operands, [row]))[0], expected[row : row + 1])


def test_fewer_tokens_of_a_block_choose_alike() -> None:
    """Where the tensor cores read registers, two tokens share a tile instead of four."""
    op, operands = CASES[0]
    assert same(Subject.of(op, operands, SM_89, 512).call(operands)[0], reference(op, operands)[0])


def test_lists_are_cut_while_they_grow() -> None:
    """Parts of more rows than their lists have room for, under scores that rise, fall, and tie in blocks."""
    count = 5000
    row = torch.arange(count)
    keys = torch.full((2, count, 17), 0x22, dtype=torch.uint8)
    # a key's scale makes its score: e8m0 codes that rise to the end, and waves of 40 values
    keys[0, :, 16], keys[1, :, 16] = 100 + row // 125, 100 + row * 7 // 300 % 40
    q, weights = torch.ones(2, 16, 32).bfloat16(), torch.ones(2, 16).bfloat16()
    operands = (q, weights, keys, ints(count - 1, count - 1), ints(0, 1), None)
    op = IndexTopk(1, 70, 1.0, 8)
    assert same(Subject.of(op, operands, SM_90, 512).call(operands)[0], reference(op, operands)[0])


def test_equal_scores_choose_the_first_rows() -> None:
    keys = torch.zeros(1, 200, 68, dtype=torch.uint8)
    q, weights = torch.ones(2, 4, 128).bfloat16(), -torch.ones(2, 4).bfloat16()
    operands = (q, weights, keys, ints(199, 150), ints(0, 0), None)
    (got,) = Subject.of(IndexTopk(1, 33, 1.0, 8), operands, SM_90, 16).call(operands)
    assert same(got, torch.arange(33).int().repeat(2, 1))


@pytest.mark.parametrize("width", [64, 128])
def test_selection_ignores_rows_that_were_never_written(width: int) -> None:
    q, weights, keys = exact_index(3, 4, width, 260)
    plain = formats.unpack(keys, "fp4_e8m0_32", width)
    positions, slots = ints(150, 199, 20), ints(0, 1, 1)
    keys[:, 200:], plain[:, 200:] = 0xFF, torch.nan
    packed: Operands = (q, weights, keys, positions, slots, None)
    exact: Operands = (q.float(), weights.float(), plain, positions, slots, None)
    for op in (IndexTopk(1, 30, 0.25, 8), CandidateBlocks(1, 5, 8, 0.25)):
        count = len(op.operands())
        expected = reference(op, packed[:count])[0]
        for operands in (packed[:count], exact[:count]):
            assert same(Subject.of(op, operands, SM_90, 512).call(operands)[0], expected)


def test_inexact_scores_choose_alike_away_from_the_cut() -> None:
    """Scores of 128 products and 32 heads carry (128 + 32) · 2^-24 of their terms' sum: rows further away are sure."""
    normal = seeded(9)
    q = formats.round_trip(normal(2, 32, 128, dtype="bf16"), "fp4_e8m0_32")
    operands = (q, normal(2, 32, dtype="bf16"), formats.pack(normal(1, 900, 128), "fp4_e8m0_32"))
    operands = (*operands, ints(899, 600), ints(0, 0), None)
    op = IndexTopk(1, 200, 128**-0.5, 8)
    (got,) = Subject.of(op, operands, SM_90, 16).call(operands)
    keys = formats.unpack(operands[2], "fp4_e8m0_32", 128)[0].double()
    weights = (operands[1] * op.scale).double()
    for row, position in enumerate((899, 600)):
        products = (q[row].double() @ keys[: position + 1].T).relu()
        scores = (products * weights[row].unsqueeze(1)).sum(0)
        error = (128 + 32) * 2.0**-24 * (products * weights[row].abs().unsqueeze(1)).sum(0).max()
        cut = scores.sort(descending=True).values[199]
        chosen = torch.zeros(position + 1, dtype=torch.bool)
        chosen[got[row].long()] = True
        assert torch.equal(got[row], got[row].unique(sorted=True))
        assert chosen[scores > cut + error].all()
        assert not chosen[scores < cut - error].any()
