"""CUDA kernels that write rings, caches and partial groups, and that read a step's tokens: equal to the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.codegen.cuda.block_order import reverse_blocks
from tests.codegen.cuda.harness import Subject
from tests.codegen.sparse_harness import Operands, reference, same
from v41c.ir import formats
from v41c.ir.op import Op, seeded
from v41c.ir.ops.cache_write import CacheWrite
from v41c.ir.ops.compress_pool import CompressPool
from v41c.ir.ops.compress_tokens import CompressTokens
from v41c.ir.ops.gather_selected import GatherSelected
from v41c.ir.ops.history_write import HistoryWrite
from v41c.ir.ops.image_mask import ImageMask
from v41c.ir.ops.run_starts import RunStarts
from v41c.ir.ops.window_write import WindowWrite
from v41c.targets.cuda import SM_90


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def runs(*parts: tuple[int, int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Positions, slots and starts of runs (slot, first position, tokens)."""
    positions = torch.cat([torch.arange(p, p + n) for _, p, n in parts]).int()
    slots = torch.cat([torch.full((n,), slot) for slot, _, n in parts]).int()
    starts, begin = [], 0
    for *_, count in parts:
        starts += [begin] * count
        begin += count
    return positions, slots, ints(*starts)


def hard_rows(rows: int, width: int) -> Tensor:
    """bf16 rows of every magnitude: zeros, powers of two, the formats' largest values and their neighbours."""
    x = seeded(rows)(rows, width) * torch.exp2(torch.arange(rows).remainder(60).sub(40).float()).unsqueeze(1)
    x[0] = 0.0
    x[1, ::2] = -0.0
    x[2] = torch.exp2(torch.arange(width).remainder(20).float() - 10)
    for row, largest in enumerate((448.0, 450.0, 6.0, 6.03125, 3.0e38, 1e-4, 2.0**-130), start=3):
        x[row] = x[row] / x[row].abs().max() * largest
    return x.bfloat16()


@pytest.fixture(params=["first block first", "last block first"], autouse=True)
def order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both orders of blocks."""
    if request.param == "last block first":
        reverse_blocks(monkeypatch)


def check(op: Op, operands: Operands, tokens: int) -> tuple[Tensor, ...]:
    results = Subject.of(op, operands, SM_90, tokens).call(operands)
    for ours, theirs in zip(results, reference(op, operands), strict=True):
        assert same(ours, theirs)
    return results


@pytest.mark.parametrize("name", formats.FORMATS)
def test_packed_rows_equal_the_format_bit_for_bit(name: str) -> None:
    x = hard_rows(24, 96)
    positions, slots, _ = runs((1, 0, 24))
    cache = torch.full((2, 30, formats.FORMATS[name].row_bytes(96)), 0xA5, dtype=torch.uint8)
    (got,) = check(CacheWrite(1, name), (cache, x, positions, slots, slots * 0), 512)
    assert torch.equal(got[1, :24], formats.pack(x, name))
    assert torch.all(got[0] == 0xA5)
    assert torch.all(got[1, 24:] == 0xA5)


@pytest.mark.parametrize(("ratio", "tokens"), [(2, 17), (4, 3), (4, 1)])
def test_only_tokens_that_close_a_group_write_and_none_that_is_kept(ratio: int, tokens: int) -> None:
    positions, slots, _ = runs((1, 5, tokens), (0, 0, 2))
    x = seeded(tokens)(len(slots), 33)
    check(CacheWrite(ratio, "fp4_e4m3_16"), (torch.full((2, 20, 33), torch.nan), x, positions, slots, slots * 7), 512)


@pytest.mark.parametrize("packed", [True, False])
def test_a_ring_keeps_the_newest_rows(packed: bool) -> None:
    x = hard_rows(23, 96)
    positions, slots, _ = runs((1, 3, 17), (0, 6, 6))
    ring = torch.full((3, 7, 99), 0xA5, dtype=torch.uint8) if packed else torch.full((3, 7, 96), torch.nan)
    (got,) = check(WindowWrite(), (ring, x if packed else x.float(), positions, slots), 512)
    newest = formats.write_rows(x[10:17], "fp8_e8m0_32", ring)
    assert same(got[1, positions[10:17].long() % 7], newest)


def test_a_history_keeps_the_newest_ids() -> None:
    positions, slots, _ = runs((1, 3, 17), (0, 6, 2), (2, 9, 1))
    check(HistoryWrite(), (torch.full((3, 3), -7).int(), torch.arange(20).int(), positions, slots), 512)


@pytest.mark.parametrize("parts", [((1, 3, 1),), ((1, 3, 17), (0, 6, 6)), ((0, 1, 1), (1, 2, 1), (1, 9, 2), (1, 3, 2))])
def test_runs_start_where_positions_or_slots_break(parts: tuple[tuple[int, int, int], ...]) -> None:
    positions, slots, starts = runs(*parts)
    (got,) = check(RunStarts(), (positions, slots), 512)
    assert same(got, starts)


@pytest.mark.parametrize("count", [1, 130])
def test_images_have_no_ids(count: int) -> None:
    tokens = torch.arange(count).int() % 11
    check(ImageMask(7), (tokens,), 512)
    check(CompressTokens(7), (tokens, torch.arange(11).int() * 3), 512)
    # the image token may lie beyond the table
    check(CompressTokens(10), (tokens % 10, torch.arange(10).int()), 512)


@pytest.mark.parametrize("length", [4, 6])
def test_pooling_of_any_cut(length: int) -> None:
    """Every cut of a sequence pools the same bits and leaves the same state, which holds NaNs before."""
    normal = seeded(3)
    tokens, width, ratio = 19, 40, 4
    k, gate = normal(tokens, width), normal(tokens, width, scale=30.0)
    op = CompressPool(ratio, "f32")
    partial = torch.full((2, length, 2, width), torch.nan)

    def step(begin: int, end: int, partial: Tensor) -> Operands:
        positions, slots, starts = runs((1, begin, end - begin))
        return partial, k[begin:end], gate[begin:end], positions, slots, starts

    subjects = {tokens: Subject.of(op, step(0, tokens, partial), SM_90, tokens) for tokens in (1, 19)}
    state, whole = subjects[19].call(step(0, tokens, partial))
    # a softmax of four and a sum of four products
    torch.testing.assert_close(whole, reference(op, step(0, tokens, partial))[1], rtol=0, atol=16 * 2.0**-24 * 4)
    for cuts in ([1, 2, 3, 4], [1, 6, 7, 11], [2]):
        current, pooled = partial, []
        for begin, end in zip([0, *cuts], [*cuts, tokens], strict=True):
            current, rows = subjects[1 if end - begin == 1 else 19].call(step(begin, end, current))
            pooled.append(rows)
        assert same(torch.cat(pooled), whole)
        assert same(current, state)


@pytest.mark.parametrize("length", [4, 5, 6])
def test_pooling_of_several_sequences(length: int) -> None:
    normal = seeded(5)
    positions, slots, starts = runs((1, 6, 11), (0, 3, 2), (2, 1, 1))
    partial = normal(3, length, 2, 33)
    operands = (partial, normal(14, 33), normal(14, 33), positions, slots, starts)
    op = CompressPool(4, "f32")
    state, pooled = Subject.of(op, operands, SM_90, 16).call(operands)
    expected_state, expected = reference(op, operands)
    assert same(state, expected_state)
    torch.testing.assert_close(pooled, expected, rtol=0, atol=16 * 2.0**-24 * 4)


@pytest.mark.parametrize("packed", [True, False])
def test_gathered_rows_have_no_gaps(packed: bool) -> None:
    """Selections with gaps, without any row, and with more rows than a block takes; rows never written are NaNs."""
    rows = seeded(6)(2, 14, 96)
    cache = formats.pack(rows, "fp4_e4m3_16") if packed else rows
    cache[:, 12:] = 0xFF if packed else torch.nan
    selection = torch.arange(11).int().repeat(3, 1)
    selection[0, [0, 3, 4, 9]], selection[1] = -1, -1
    check(GatherSelected(96, 101), (cache, selection, ints(1, 0, 1)), 512)
