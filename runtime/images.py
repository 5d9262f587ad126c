"""Images for the vision tower: files to pixels, pixels to patches, and where an image stands in a prompt.

DeepSeek-V4.1 report, section 2.6. What is read: PNG, JPEG and WebP, the first frame, upright as EXIF says, converted to
RGB as Pillow does it: grey and palettes become colours, alpha is left out and what lies under it shows.
"""

from __future__ import annotations

import hashlib
import io
import math
import struct
import warnings
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from v41c.errors import UsageError

if TYPE_CHECKING:
    from PIL.Image import Image

Pixels = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]

FORMATS = ("PNG", "JPEG", "WEBP")
#: what stands at a position of an image's span, where it is no row of the tower: codes of `Grid.span`
START, NEWLINE, END = -2, -3, -4
#: what padding is filled with: the middle of the range, 0 once scaled
_GREY = 127
_DAMAGED = (OSError, SyntaxError, ValueError, EOFError, IndexError, KeyError, TypeError, struct.error, zlib.error)


@dataclass(frozen=True)
class Grid:
    """An image in patches, and in rows of the tower, each of `merged` x `merged` patches (fewer at the ends)."""

    rows: int
    columns: int
    merged: int

    @property
    def patches(self) -> int:
        """How many patches there are."""
        return self.rows * self.columns

    @property
    def places(self) -> tuple[int, int]:
        """Rows and columns of what the tower gives."""
        return -(-self.rows // self.merged), -(-self.columns // self.merged)

    @property
    def merged_rows(self) -> int:
        """How many rows the tower gives."""
        rows, columns = self.places
        return rows * columns

    @property
    def span_tokens(self) -> int:
        """Positions of a prompt: start, rows that each end with a newline, end."""
        rows, columns = self.places
        return 1 + rows * (columns + 1) + 1

    def span(self) -> Ints:
        """i32 [positions]: rows of the tower counted from 0, and START, NEWLINE, END between them."""
        rows, columns = self.places
        lines = np.full((rows, columns + 1), NEWLINE, np.int32)
        lines[:, :-1] = np.arange(rows * columns, dtype=np.int32).reshape(rows, columns)
        return np.concatenate([[START], lines.reshape(-1), [END]]).astype(np.int32)

    def coordinates(self) -> tuple[Ints, Ints]:
        """Row and column of every patch: i32 [P], i32 [P]."""
        rows, columns = np.indices((self.rows, self.columns), np.int32)
        return rows.reshape(-1), columns.reshape(-1)

    def sources(self) -> Ints:
        """i32 [rows of the tower, merged²]: the patches of each, row by row; -1 where the image has ended."""
        height, width = self.places
        padded = np.full((height * self.merged, width * self.merged), -1, np.int32)
        padded[: self.rows, : self.columns] = np.arange(self.patches, dtype=np.int32).reshape(self.rows, self.columns)
        blocks = padded.reshape(height, self.merged, width, self.merged).transpose(0, 2, 1, 3)
        return np.ascontiguousarray(blocks.reshape(height * width, self.merged**2))


@dataclass(frozen=True)
class Rules:
    """How a model takes images: sides of patches in pixels, patches merged a side, positions of a span at most."""

    patch: int
    merged: int
    max_tokens: int
    min_pixels: int
    max_wh_ratio: float | None = None

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Rules | None:
        """The rules in a configuration in the flat spelling; None of a model that takes no images."""
        if not config.get("vision_n_layers"):
            return None
        ratio = config.get("vision_max_wh_ratio")
        return cls(
            patch=config["vision_patch_size"],
            merged=config["vision_downsample_ratio"],
            max_tokens=config["vision_max_n_token"],
            min_pixels=config["vision_min_pixels"],
            max_wh_ratio=None if ratio is None else float(ratio),
        )

    @property
    def max_patches(self) -> int:
        """More patches than any image is cut into."""
        return self.max_tokens * self.merged**2

    def grid(self, width: int, height: int) -> Grid:
        """The patches of an image of so many pixels.

        The sides grow, in proportion, until there are `min_pixels`, and go up to whole patches. A span that is longer
        than `max_tokens` then is that of the largest image of this proportion that fits. UsageError when none does.
        """
        w, h = self._proportion(width, height)
        grown = w * h < self.min_pixels
        columns = _ceil_root(self.min_pixels * w / (h * self.patch**2)) if grown else math.ceil(w / self.patch)
        rows = _ceil_root(self.min_pixels * h / (w * self.patch**2)) if grown else math.ceil(h / self.patch)
        grid = Grid(rows, columns, self.merged)
        return grid if grid.span_tokens <= self.max_tokens else self._shrunk(w, h)

    def squeezed(self, width: int, height: int) -> bool:
        """Whether an image is wider, or higher, than `max_wh_ratio` allows: it is then squeezed to that proportion."""
        return self.max_wh_ratio is not None and max(width, height) > self.max_wh_ratio * min(width, height)

    def _proportion(self, width: int, height: int) -> tuple[Fraction, Fraction]:
        """The sides, the longer one cut to what `max_wh_ratio` allows."""
        w, h = Fraction(width), Fraction(height)
        if self.max_wh_ratio is None:
            return w, h
        most = Fraction(self.max_wh_ratio)
        return min(w, h * most), min(h, w * most)

    def _shrunk(self, w: Fraction, h: Fraction) -> Grid:
        side = self.patch * self.merged
        scales = []
        for rows in range(1, self.max_tokens // 2):
            columns = (self.max_tokens - 2) // rows - 1
            if columns > 0:
                scales.append(min(side * rows / h, side * columns / w))
        if not scales:
            raise UsageError(f"vision_max_n_token: expected at least 4 positions for an image, got {self.max_tokens}")
        scale = max(scales)
        return Grid(math.ceil(h * scale / self.patch), math.ceil(w * scale / self.patch), self.merged)


def _ceil_root(value: Fraction) -> int:
    """The least integer whose square is not below a positive value."""
    return math.isqrt(math.ceil(value) - 1) + 1


@dataclass(frozen=True, eq=False)
class Picture:
    """An image as the tower takes it: patches f32 [P, 3·side·side] in [−1, 1], and a digest of what was seen."""

    grid: Grid
    patches: Floats
    digest: bytes


def read_picture(path: str | Path, rules: Rules) -> Picture:
    """The picture in a file. UsageError, naming it, for what cannot be read or is no image."""
    try:
        content = Path(path).read_bytes()
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    return make_picture(read_pixels(content, str(path)), rules)


def read_pixels(content: bytes, name: str) -> Pixels:
    """Pixels u8 [height, width, 3] of the bytes of a file. UsageError, naming `name`, for what is no whole image."""
    # imported here: an engine that is given text starts without the library
    from PIL import Image, ImageOps, UnidentifiedImageError

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            with Image.open(io.BytesIO(content), formats=FORMATS) as image:
                upright = ImageOps.exif_transpose(image)
                return np.array(_rgb(upright), np.uint8)
        except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
            most = Image.MAX_IMAGE_PIXELS
            raise UsageError(f"{name}: expected an image of at most {most} pixels, got a larger one") from error
        except UnidentifiedImageError as error:
            raise UsageError(f"{name}: expected a PNG, JPEG or WebP image, got something else") from error
        except _DAMAGED as error:
            reason = " ".join(str(error).split())
            raise UsageError(f"{name}: expected a whole image, got a damaged one: {reason}") from error


def _rgb(image: Image) -> Image:
    if image.mode.startswith("I"):  # 16 bits of grey, which Pillow would cut off at 255
        from PIL import Image as library

        image = library.fromarray((np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))
    if image.mode == "P":  # a palette's transparent entries keep their colours
        image = image.convert("RGBA")
    return image.convert("RGB")


def make_picture(pixels: Pixels, rules: Rules) -> Picture:
    """Pixels u8 [height, width, 3], resized, padded with grey around the middle, scaled and cut into patches."""
    height, width = pixels.shape[:2]
    grid = rules.grid(width, height)
    patches = cut(fitted(pixels, grid, rules), rules.patch)
    digest = hashlib.sha256(struct.pack("<3i", grid.rows, grid.columns, grid.merged) + patches.tobytes())
    return Picture(grid, patches.astype(np.float32) / np.float32(127.5) - np.float32(1), digest.digest())


def fitted(pixels: Pixels, grid: Grid, rules: Rules) -> Pixels:
    """Pixels of whole patches: the image as large as fits in its proportion, in the middle, grey beside it.

    One that is wider than `max_wh_ratio` allows is resampled to all of it, out of proportion. Sampling is bicubic.
    """
    from PIL import Image

    height, width = pixels.shape[:2]
    size = (grid.columns * rules.patch, grid.rows * rules.patch)
    inner = size if rules.squeezed(width, height) else _inner(width, height, size)
    image = Image.fromarray(pixels)
    sampled = image if inner == (width, height) else image.resize(inner, Image.Resampling.BICUBIC)
    canvas = np.full((size[1], size[0], 3), _GREY, np.uint8)
    left, top = (size[0] - inner[0]) // 2, (size[1] - inner[1]) // 2
    canvas[top : top + inner[1], left : left + inner[0]] = np.asarray(sampled)
    return canvas


def _inner(width: int, height: int, size: tuple[int, int]) -> tuple[int, int]:
    """The largest size of this proportion within another, at least a pixel high and wide."""
    scale = min(Fraction(size[0], width), Fraction(size[1], height))
    return max(1, round(width * scale)), max(1, round(height * scale))


def cut(pixels: Pixels, side: int) -> Pixels:
    """Pixels [rows · side, columns · side, 3] as patches [rows · columns, 3 · side · side]: channel, row, column."""
    height, width = pixels.shape[:2]
    blocks = pixels.reshape(height // side, side, width // side, side, 3).transpose(0, 2, 4, 1, 3)
    return np.ascontiguousarray(blocks.reshape(-1, 3 * side * side))
