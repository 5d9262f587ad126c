"""Images: what is read and what is refused, how they are resized and cut, and the positions that they take."""

from __future__ import annotations

import io
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from v41c.errors import UsageError
from v41c.runtime import images
from v41c.runtime.images import END, NEWLINE, START, Grid, Rules, make_picture, read_picture, read_pixels

RELEASE = Rules(patch=14, merged=3, max_tokens=1024, min_pixels=295936)
SMALL = Rules(patch=14, merged=3, max_tokens=64, min_pixels=3136)
SIDES = st.integers(1, 5000)


def encoded(image: Image.Image, format: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def noise(width: int, height: int, channels: int = 3, seed: int = 0) -> np.ndarray:
    shape = (height, width, channels)[: 3 if channels > 1 else 2]
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


@pytest.mark.parametrize(
    ("size", "grid", "tokens"),
    [
        # 544² pixels are the least: 38.9 patches a side
        ((544, 544), (39, 39), 1 + 13 * 14 + 1),
        ((1, 1), (39, 39), 1 + 13 * 14 + 1),
        # as it is: 42.86 and 57.1 patches, 15 by 20 places
        ((800, 600), (43, 58), 1 + 15 * 21 + 1),
        # too many: of all heights in places, 27 with 36 columns is the largest of 4:3
        ((4000, 3000), (81, 108), 1 + 27 * 37 + 1),
        # a line: one row of 1021 places and its newline
        ((100_000, 1), (1, 3063), 1 + 1022 + 1),
        ((1, 100_000), (1533, 1), 1 + 511 * 2 + 1),
    ],
)
def test_sizes_of_the_release_worked_out_by_hand(size: tuple[int, int], grid: tuple[int, int], tokens: int) -> None:
    found = RELEASE.grid(*size)
    assert ((found.rows, found.columns), found.span_tokens) == (grid, tokens)


@settings(max_examples=200, deadline=None)
@given(width=SIDES, height=SIDES)
def test_the_plan_is_the_largest_of_the_images_proportion(width: int, height: int) -> None:
    """Every scale at which a side fills whole patches is tried: the plan is at the largest that is allowed."""

    def at(scale: Fraction) -> Grid:
        return Grid(math.ceil(height * scale / 14), math.ceil(width * scale / 14), 3)

    found = SMALL.grid(width, height)
    assert 1 <= found.span_tokens <= SMALL.max_tokens
    assert found.patches <= SMALL.max_patches
    wanted = at(Fraction(1))
    if width * height < SMALL.min_pixels:
        pairs = ((height, width), (width, height))
        least = [next(n for n in range(1, 10_000) if (14 * n) ** 2 * b >= 3136 * a) for a, b in pairs]
        wanted = Grid(least[0], least[1], 3)
    if wanted.span_tokens > SMALL.max_tokens:
        fills = [Fraction(14 * count, side) for side in (width, height) for count in range(1, 200)]
        wanted = at(max(scale for scale in fills if at(scale).span_tokens <= SMALL.max_tokens))
    assert found == wanted


@settings(max_examples=100, deadline=None)
@given(rows=st.integers(1, 40), columns=st.integers(1, 40), merged=st.integers(1, 4))
@example(rows=1, columns=1, merged=3)
def test_spans_and_sources_name_everything_once(rows: int, columns: int, merged: int) -> None:
    grid = Grid(rows, columns, merged)
    height, width = grid.places
    span = grid.span()
    assert len(span) == grid.span_tokens
    assert (span[0], span[-1]) == (START, END)
    lines = span[1:-1].reshape(height, width + 1)
    assert (lines[:, -1] == NEWLINE).all()
    assert lines[:, :-1].reshape(-1).tolist() == list(range(height * width))
    patch_rows, patch_columns = grid.coordinates()
    sources = grid.sources()
    assert sources.shape == (height * width, merged * merged)
    assert sorted(sources[sources >= 0]) == list(range(rows * columns))
    for place, line in enumerate(sources):
        for offset, patch in enumerate(line):
            row = place // width * merged + offset // merged
            column = place % width * merged + offset % merged
            inside = row < rows and column < columns
            assert (patch >= 0) == inside
            if inside:
                assert (patch_rows[patch], patch_columns[patch]) == (row, column)


def test_patches_are_channel_row_column_of_scaled_pixels() -> None:
    pixels = noise(70, 56)
    picture = make_picture(pixels, SMALL)
    assert picture.grid == Grid(4, 5, 3)
    assert picture.patches.shape == (20, 588)
    wanted = pixels.astype(np.float64) / 255 * 2 - 1
    for patch, channel, row, column in ((0, 0, 0, 0), (7, 2, 13, 4), (19, 1, 5, 13)):
        found = picture.patches[patch, (channel * 14 + row) * 14 + column]
        assert abs(found - wanted[patch // 5 * 14 + row, patch % 5 * 14 + column, channel]) < 1e-6


def test_an_image_of_the_planned_size_is_not_resampled_and_others_lie_in_grey() -> None:
    pixels = np.full((50, 64, 3), 255, np.uint8)
    grid = SMALL.grid(64, 50)
    assert (grid.rows, grid.columns) == (4, 5)
    canvas = images.fitted(pixels, grid, SMALL)
    assert canvas.shape == (56, 70, 3)
    # 64 x 50 fits 70 x 55: a row of grey below
    assert (canvas[:55] == 255).all()
    assert (canvas[55:] == 127).all()


def test_beyond_the_allowed_proportion_an_image_is_squeezed() -> None:
    rules = Rules(14, 3, 64, 3136, max_wh_ratio=2.0)
    pixels = np.full((56, 560, 3), 255, np.uint8)
    grid = rules.grid(560, 56)
    assert (grid.rows, grid.columns) == (4, 8)
    assert (images.fitted(pixels, grid, rules) == 255).all()
    assert rules.grid(112, 56) == Grid(4, 8, 3)
    assert not rules.squeezed(112, 56)


@settings(max_examples=60, deadline=None)
@given(width=st.integers(1, 300), height=st.integers(1, 300), seed=st.integers(0, 5))
@example(width=1, height=1, seed=0)
@example(width=300, height=1, seed=0)
@example(width=1, height=300, seed=0)
def test_every_size_gives_patches_of_its_plan(width: int, height: int, seed: int) -> None:
    pixels = noise(width, height, seed=seed)
    picture = make_picture(pixels, SMALL)
    assert picture.patches.shape == (SMALL.grid(width, height).patches, 588)
    assert np.abs(picture.patches).max() <= 1
    assert make_picture(pixels, SMALL).digest == picture.digest


def test_digests_tell_pictures_apart() -> None:
    pixels = noise(56, 56)
    other = pixels.copy()
    other[3, 4, 1] ^= 1
    flat = np.full((56, 84, 3), 9, np.uint8)
    pictures = [make_picture(each, SMALL) for each in (pixels, other, flat, flat.transpose(1, 0, 2))]
    assert len({picture.digest for picture in pictures}) == 4


COLOURS = noise(30, 20, seed=3)


def test_every_format_and_mode_is_rgb() -> None:
    exact = Image.fromarray(COLOURS)
    assert (read_pixels(encoded(exact, "PNG"), "a.png") == COLOURS).all()
    assert (read_pixels(encoded(exact, "WEBP", lossless=True), "a.webp") == COLOURS).all()
    smooth = Image.fromarray(COLOURS).resize((60, 40)).resize((30, 20))
    found = read_pixels(encoded(smooth, "JPEG", quality=100, subsampling=0), "a.jpg")
    assert np.abs(found.astype(int) - np.asarray(smooth)).max() <= 6
    grey = noise(30, 20, 1)
    assert (read_pixels(encoded(Image.fromarray(grey), "PNG"), "g.png") == grey[..., None]).all()
    deep = grey.astype(np.uint16) * 257
    assert (read_pixels(encoded(Image.fromarray(deep), "PNG"), "deep.png") == grey[..., None]).all()
    bits = Image.fromarray(grey > 127)
    assert (read_pixels(encoded(bits, "PNG"), "b.png") == np.where(grey > 127, 255, 0)[..., None]).all()


def test_alpha_is_left_out() -> None:
    """As `convert("RGB")` does: what lies under transparent pixels shows."""
    clear = np.concatenate([COLOURS, np.zeros((20, 30, 1), np.uint8)], 2)
    assert (read_pixels(encoded(Image.fromarray(clear), "PNG"), "a.png") == COLOURS).all()
    palette = Image.fromarray(COLOURS).quantize(16)
    wanted = np.asarray(palette.convert("RGB"))
    found = read_pixels(encoded(palette, "PNG", transparency=bytes([0, 128, *[255] * 14])), "p.png")
    assert (found == wanted).all()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_turned_upright(orientation: int) -> None:
    """The eight orientations of EXIF: how the stored rows and columns lie in the upright image."""
    turns = {
        1: lambda a: a,
        2: lambda a: a[:, ::-1],
        3: lambda a: a[::-1, ::-1],
        4: lambda a: a[::-1],
        5: lambda a: a.transpose(1, 0, 2),
        6: lambda a: np.rot90(a, -1),
        7: lambda a: np.rot90(a, 2).transpose(1, 0, 2),
        8: lambda a: np.rot90(a, 1),
    }
    exif = Image.Exif()
    exif[0x0112] = orientation
    found = read_pixels(encoded(Image.fromarray(COLOURS), "PNG", exif=exif), "a.png")
    assert (found == turns[orientation](COLOURS)).all()


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP"])
def test_damaged_files_are_refused_in_one_line(format: str) -> None:
    """Cut off anywhere, or with bytes overwritten: pixels or a UsageError, never anything else."""
    whole = encoded(Image.fromarray(noise(90, 70)), format)
    draw = np.random.default_rng(5)
    refused = []
    for attempt in range(60):
        damaged = bytearray(whole)
        if attempt % 2:
            del damaged[int(draw.integers(0, len(whole))) :]
        else:
            for place in draw.integers(0, len(whole), 8):
                damaged[place] = draw.integers(0, 256)
        try:
            assert read_pixels(bytes(damaged), "x.img").shape[2] == 3
        except UsageError as error:
            refused.append(str(error))
    assert len(refused) >= 25
    assert all(text.startswith("x.img: expected a") and "\n" not in text for text in refused)


def test_what_is_no_image_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"absent\.png: cannot be read: No such file or directory$"):
        read_picture(tmp_path / "absent.png", SMALL)
    with pytest.raises(UsageError, match=r"cannot be read: Is a directory$"):
        read_picture(tmp_path, SMALL)
    for content in (b"", b"hello", encoded(Image.fromarray(COLOURS), "BMP"), encoded(Image.fromarray(COLOURS), "GIF")):
        with pytest.raises(UsageError, match=r"^t: expected a PNG, JPEG or WebP image, got something else$"):
            read_pixels(content, "t")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 500)
    # above the limit Pillow warns, above twice the limit it refuses
    for content in (COLOURS, noise(80, 80)):
        with pytest.raises(UsageError, match=r"^t: expected an image of at most 500 pixels, got a larger one$"):
            read_pixels(encoded(Image.fromarray(content), "PNG"), "t")


def test_a_model_whose_spans_hold_no_image_says_so() -> None:
    with pytest.raises(UsageError, match="vision_max_n_token: expected at least 4 positions for an image, got 3"):
        Rules(14, 3, 3, 3136).grid(56, 56)
