"""Kernels that reorder sparse reads: rows in the table's order, pages asked for ahead, selected rows gathered once."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from tests.codegen.harness import Library, aligned
from tests.codegen.sparse_harness import Operands, Subject, build, reference, same
from v41c.codegen.cpu import layouts
from v41c.ir import formats
from v41c.ir.op import seeded
from v41c.ir.ops.attend import Attend
from v41c.ir.ops.attend_gathered import AttendGathered
from v41c.ir.ops.engram_lookup import EngramLookup
from v41c.ir.ops.engram_lookup_ordered import EngramLookupOrdered
from v41c.ir.ops.gather_selected import GatherSelected
from v41c.ir.ops.moe_experts import MoeExperts
from v41c.ir.ops.sort_rows import SortRows
from v41c.targets import x86_64

TABLE_ROWS, WIDTH = 50, 32


# ---- Engram rows -----------------------------------------------------------------------------------------------------


def table(used: Tensor) -> tuple[Tensor, Tensor]:
    """An fp8 table and its scales whose unused rows are NaN."""
    normal = seeded(3)
    values = (normal(TABLE_ROWS, WIDTH) * 60).to(torch.float8_e4m3fn)
    scales = (normal(TABLE_ROWS, 1) * 4 + 118).to(torch.uint8)
    unused = torch.ones(TABLE_ROWS, dtype=torch.bool)
    unused[used.flatten()] = False
    values.view(torch.uint8)[unused] = 0x7F
    scales[unused] = 0xFF
    return values, scales.view(torch.float8_e8m0fnu)


@cache
def lookups(each: int) -> tuple[Library, Subject, Subject]:
    """Kernels for up to 40 tokens of `each` rows."""
    rows = torch.zeros(2, each, dtype=torch.int64)
    ordered = (*SortRows().reference(rows), *table(rows))
    target = x86_64.host()
    sort = Subject.of(SortRows(), (rows, None, None), target, 40)
    lookup = Subject.of(EngramLookupOrdered("bf16"), ordered, target, 40)
    return build((sort, lookup), target), sort, lookup


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.data())
def test_rows_in_the_tables_order_are_the_rows(data: st.DataObject) -> None:
    """Any tokens, none, one; equal rows; the first and the last row of the table."""
    each = data.draw(st.sampled_from((1, 3, 6)))
    tokens = data.draw(st.integers(0, 40))
    numbers = st.one_of(st.integers(0, TABLE_ROWS - 1), st.sampled_from((0, TABLE_ROWS - 1, 7)))
    flat = data.draw(st.lists(numbers, min_size=tokens * each, max_size=tokens * each))
    rows = torch.tensor(flat, dtype=torch.int64).view(tokens, each)
    library, sort, lookup = lookups(each)
    ordered, places = sort.call(library, (rows, None, None))
    assert all(same(a, b) for a, b in zip((ordered, places), SortRows().reference(rows), strict=True))
    assert (ordered.flatten().diff() >= 0).all()
    assert sorted(places.flatten().tolist()) == list(range(tokens * each))
    given_table = table(rows)
    (values,) = lookup.call(library, (ordered, places, *given_table))
    assert torch.isfinite(values).all()
    assert same(values, reference(EngramLookup("bf16"), (rows, *given_table))[0])


def resident(mapped: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Whether each page of a mapped file is in memory."""
    pages = -(-mapped.nbytes // mmap.PAGESIZE)
    found = np.zeros(pages, np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    asked = (ctypes.c_void_p(mapped.ctypes.data), ctypes.c_size_t(mapped.nbytes), ctypes.c_void_p(found.ctypes.data))
    assert libc.mincore(*asked) == 0
    present: NDArray[np.bool_] = found % 2 == 1
    return present


def test_rows_on_disk_are_asked_for_ahead(tmp_path: Path) -> None:
    """Pages of the rows come to memory without anybody reading them; others stay where they are."""
    file, count = tmp_path / "table", 1 << 16
    np.random.default_rng(1).integers(0, 250, (count, 256), np.uint8).tofile(file)
    rows = torch.tensor([[3, count - 1], [40_000, 3], [40_001, 40_016]])
    example = torch.zeros(4, 256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    subject = Subject.of(SortRows(), (rows, example, None), x86_64.host(), 8)
    library = build((subject,), x86_64.host())
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    mapped = np.memmap(file, np.uint8, "r", shape=(count, 256))
    before = resident(mapped)
    out = [np.full((3, 2), -1, dtype) for dtype in (np.int64, np.int32)]
    library.call(subject.kernel, [rows.numpy(), mapped, *out], {"T": 3})
    assert out[0].flatten().tolist() == [3, 3, 40_000, 40_001, 40_016, count - 1]
    wanted = np.unique(rows.numpy() * 256 // mmap.PAGESIZE)
    deadline = time.monotonic() + 20
    while not resident(mapped)[wanted].all():
        assert time.monotonic() < deadline, "the rows never came"
        time.sleep(0.01)
    if not before.any():  # where files live in memory, nothing can be dropped
        assert resident(mapped).sum() < before.size // 2


def test_memory_that_is_no_file_is_left_alone() -> None:
    rows = torch.tensor([[3, 1]])
    operands = (rows, *table(rows))
    subject = Subject.of(SortRows(), operands, x86_64.host(), 4)
    got = subject.call(build((subject,), x86_64.host()), operands)
    assert all(same(a, b) for a, b in zip(got, reference(SortRows(), operands), strict=True))


# ---- selected rows ---------------------------------------------------------------------------------------------------


def attention(tokens: int, chosen: int, start: int, packed: bool) -> tuple[Operands, Operands]:
    """Operands of `attend` for a run at a position, and those of the gathering; rows nobody chose are NaN."""
    normal = seeded(chosen + start)
    width, heads, rows = 64, 20, 300
    positions = torch.arange(start, start + tokens, dtype=torch.int32)
    slots, zero = torch.ones(tokens, dtype=torch.int32), torch.zeros(tokens, dtype=torch.int32)
    selection = normal(tokens, rows).argsort(1)[:, :chosen].sort(1).values.int()
    selection[:, -3:] = -1
    selection[0, : chosen // 4 : 2] = -1
    values = normal(2, rows, width)
    cache = formats.pack(values, "fp4_e4m3_16") if packed else values
    unused = torch.ones(rows, dtype=torch.bool)
    unused[selection[selection >= 0].long()] = False
    cache.view(torch.uint8)[:, unused] = 0xFF
    cache.view(torch.uint8)[0] = 0xFF
    window = normal(2, 16, width)
    kv = formats.round_trip(normal(tokens, width, dtype="bf16"), "fp8_e8m0_32")
    q = normal(tokens, heads, width, dtype="bf16")
    angle = normal(tokens, 8) * 3
    ring = formats.pack(window, "fp8_e8m0_32") if packed else window
    x = (q, kv) if packed else (q.float(), kv.float())
    step = (*x, normal(heads), ring, positions, slots, zero, zero, angle.cos(), angle.sin())
    return (*step, cache, selection), (cache, selection, slots)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("tokens", "most"), [(1, 1), (1, 8), (7, 8)])
def test_attention_to_gathered_rows_has_the_same_bits(tokens: int, most: int, packed: bool) -> None:
    """Blocks of window and rows, of rows alone, and the last, shorter one; a window that fills up."""
    target = x86_64.host()
    for chosen in (20, 211):
        operands, sources = attention(tokens, chosen, 0, packed)
        gather = GatherSelected(64, 80)
        subjects = (
            Subject.of(Attend(0.1), operands, target, most),
            Subject.of(gather, sources, target, most),
            Subject.of(AttendGathered(0.1), (*operands[:10], *reference(gather, sources), operands[11]), target, most),
        )
        library = build(subjects, target)
        for start in (0, 3, 40):
            operands, sources = attention(tokens, chosen, start, packed)
            (rows,) = subjects[1].call(library, sources)
            assert same(rows, reference(gather, sources)[0])
            wanted = subjects[0].call(library, operands)
            found = subjects[2].call(library, (*operands[:10], rows, operands[11]))
            assert torch.isfinite(wanted[1]).all()
            assert all(same(a, b) for a, b in zip(wanted, found, strict=True)), (chosen, start)


# ---- experts ---------------------------------------------------------------------------------------------------------


def test_expert_dispatch_is_sorted_by_expert() -> None:
    """Many tokens: the kernel's tables hold every (token, expert) pair once, by expert, in the order of the tokens."""
    normal, experts, tokens, chosen = seeded(4), 5, 23, 2
    ids = normal(tokens, experts).argsort(1)[:, :chosen].int()  # in no order
    stacks = [normal(experts, *shape) for shape in ((16, 24), (16, 24), (24, 16))]
    operands = (normal(tokens, 24), ids, normal(tokens, chosen).sigmoid(), *stacks, None, None, None)
    subject = Subject.of(MoeExperts(2.0, "none"), operands, x86_64.host(), tokens)
    library = build((subject,), x86_64.host())
    arrays = [operand.numpy() for operand in operands if operand is not None]
    for index, layout in subject.kernel.layouts.items():
        arrays[index] = aligned(layouts.pack(layout, arrays[index], "f32"))
    command = library.command(subject.kernel, [*arrays, np.empty((tokens, 24), np.float32)], {"T": tokens})
    command()
    workspace = command.keep[0][len(arrays) + 1].view(np.int32)
    starts, pairs = workspace[: experts + 1], workspace[2 * experts + 1 :][: tokens * chosen]
    flat = ids.flatten().numpy()
    np.testing.assert_array_equal(pairs, np.argsort(flat, kind="stable"))
    np.testing.assert_array_equal(np.diff(starts), np.bincount(flat, minlength=experts))
