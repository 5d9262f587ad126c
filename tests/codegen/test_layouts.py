"""Weight layouts: where every element goes, and what cannot be packed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from v41c.codegen.cpu.layouts import pack, packed_bytes
from v41c.errors import UnsupportedError


def strip_width(panels: int, strip: int, panel: int) -> int:
    return min(strip, panels - panel // strip * strip)


@pytest.mark.parametrize(("rows", "strip"), [(16, 1), (80, 2), (70, 4), (33, 8), (1, 2)])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f8e4m3", "f4e2m1"])
def test_every_element_is_where_the_layout_says(rows: int, strip: int, dtype: str) -> None:
    generator = np.random.default_rng(rows)
    stack, columns = 2, 64
    top = {"f32": 1 << 32, "bf16": 1 << 16, "f8e4m3": 256, "f4e2m1": 16}[dtype]
    values = generator.integers(1, top, (stack, rows, columns), dtype=np.uint64)
    packed_pairs = values[..., ::2] | values[..., 1::2] << np.uint64(4)
    stored: dict[str, NDArray[Any]] = {
        "f32": values.astype(np.uint32).view(np.float32),
        "bf16": values.astype(np.uint16),
        "f8e4m3": values.astype(np.uint8),
        "f4e2m1": packed_pairs.astype(np.uint8),
    }
    packed = pack(f"panels{strip}", stored[dtype], dtype)
    assert packed.nbytes == packed_bytes(f"panels{strip}", (stack, rows, columns), dtype)
    panels = -(-rows // 16)
    bits, per_word = {"f32": (32, 1), "bf16": (16, 1), "f8e4m3": (8, 4), "f4e2m1": (4, 4)}[dtype]
    depth = columns // per_word
    for _ in range(200):
        s, panel, lane, k = (int(generator.integers(n)) for n in (stack, panels, 16, columns))
        width = strip_width(panels, strip, panel)
        vector = panel // strip * strip * depth + k // per_word * width + panel % strip
        word = int(packed[s, vector * 16 + lane]) >> (k % per_word * bits) & (2**bits - 1)
        row = panel * 16 + lane
        assert word == (int(values[s, row, k]) if row < rows else 0)


def interleave(low: NDArray[Any], high: NDArray[Any], half: str) -> NDArray[Any]:
    """What the unpack instructions of 256 bits do: the lower or upper elements of each half of 128 bits, in turn."""
    sides = [side.reshape(2, 2, -1)[:, 0 if half == "low" else 1] for side in (low, high)]
    return np.stack(sides, axis=-1).reshape(-1)


@pytest.mark.parametrize(("rows", "strip"), [(16, 1), (80, 2), (33, 3)])
def test_nibbles_unpack_to_sixteen_outputs_of_each_k(rows: int, strip: int) -> None:
    generator = np.random.default_rng(rows)
    values = generator.integers(1, 16, (2, rows, 64), dtype=np.uint8)
    packed = pack(f"nibbles{strip}", values[..., ::2] | values[..., 1::2] << 4, "f4e2m1")
    assert packed.nbytes == packed_bytes(f"nibbles{strip}", values.shape, "f4e2m1")
    for panel in range(-(-rows // 16)):
        width = strip_width(-(-rows // 16), strip, panel)
        for word in range(16):
            vector = panel // strip * strip * 16 + word * width + panel % strip
            stored = packed[1, vector * 16 : (vector + 1) * 16].view(np.uint8)
            found = []
            for codes in (stored & 15, stored >> 4):
                for part in ("low", "high"):
                    halves = interleave(np.zeros_like(codes), codes, part).view(np.uint16)
                    words = [interleave(np.zeros_like(halves), halves, end).view(np.uint32) for end in ("low", "high")]
                    found.append(np.concatenate(words) >> 24)
            count = min(16, rows - panel * 16)
            expected = values[1, panel * 16 : panel * 16 + count, word * 4 : word * 4 + 4].T
            assert np.array_equal(np.stack(found)[:, :count], expected)


@pytest.mark.parametrize(("rows", "strip"), [(64, 2), (80, 5), (33, 3)])
def test_scales_follow_their_panels(rows: int, strip: int) -> None:
    generator = np.random.default_rng(rows)
    blocks = generator.integers(0, 255, (2, -(-rows // 32), 7), dtype=np.uint8)
    packed = pack(f"block_scales{strip}", blocks, "e8m0")
    assert packed.nbytes == packed_bytes(f"block_scales{strip}", blocks.shape, "e8m0")
    lanes = generator.integers(0, 255, (2, rows, 7), dtype=np.uint8)
    by_row = pack(f"row_scales{strip}", lanes, "e8m0")
    assert by_row.nbytes == packed_bytes(f"row_scales{strip}", lanes.shape, "e8m0")
    for panel in range(-(-rows // 16)):
        for group in range(7):
            block_width = strip_width(2 * -(-rows // 32), strip, panel)
            place = panel // strip * strip * 7 + group * block_width + panel % strip
            assert (packed[:, place] == blocks[:, panel // 2, group]).all()
            width = strip_width(-(-rows // 16), strip, panel)
            start = (panel // strip * strip * 7 + group * width + panel % strip) * 16
            count = min(16, rows - panel * 16)
            assert (by_row[:, start : start + count] == lanes[:, panel * 16 : panel * 16 + count, group]).all()


def test_groups_are_a_stack() -> None:
    values = np.random.default_rng(0).standard_normal((60, 24)).astype(np.float32)
    grouped = pack("panels2:3", values, "f32")
    assert np.array_equal(grouped, pack("panels2", values.reshape(3, 20, 24), "f32"))
    assert grouped.nbytes == packed_bytes("panels2:3", values.shape, "f32")


def test_what_cannot_be_packed_is_named() -> None:
    with pytest.raises(UnsupportedError, match="panels2 of f8e4m3: columns: expected a multiple of 32, got 48"):
        pack("panels2", np.zeros((16, 48), np.uint8), "f8e4m3")
    with pytest.raises(UnsupportedError, match="panels2 of f4e2m1: columns: expected a multiple of 32, got 48"):
        pack("panels2", np.zeros((16, 24), np.uint8), "f4e2m1")
    for layout in ("panels", "panels0", "rows2", "panels2:0"):
        with pytest.raises(UnsupportedError, match=f"layout: expected panelsS, .* got {layout}"):
            pack(layout, np.zeros((16, 32), np.uint8), "f8e4m3")
