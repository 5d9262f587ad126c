"""The images of golden runs: where their spans stand, how their patches lie, and what the vision tower makes of them.

A run names its image z `image{z}.patches` [P, 3·side·side] or [P, 3, side, side] and `image{z}.types`, the types of its
span's positions; `token_types` [B, n] holds those of all positions of the prompts (−1 text, 0 start, 1 image,
2 newline, 3 end). `p.vit_out.{z}` and `p.aligner_out.{z}` are what the tower gives. Each may have a leading axis of 1.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from v41c.frontend.config import ModelConfig
from v41c.runtime.images import Grid, Picture, Rules
from v41c.runtime.vision import ImagePrompt, Placed
from v41c.subject import Array

TEXT, START, IMAGE, NEWLINE, END = -1, 0, 1, 2, 3
#: landmarks by what golden tensors are called
_TOWER = {"vit_out": "vit_out", "aligner_out": "features"}


@dataclass(frozen=True, eq=False)
class GoldenImage:
    """An image of a sequence: its span begins at position `begin`, its patches f32 [P, 3·side·side] lie in a grid.

    What is recorded tells rows and columns of the tower's result, not always those of the patches: `grids` are all that
    fit, the likeliest first. `tower` [P, vision D] and [R, D] by landmark.
    """

    begin: int
    patches: Array
    grids: tuple[Grid, ...]
    tower: Mapping[str, Array]

    def placed(self) -> Placed:
        """The picture, its patches in the first grid."""
        return Placed(Picture(self.grids[0], self.patches, b""), self.begin)


def with_images(tokens: Array, images: tuple[GoldenImage, ...]) -> ImagePrompt:
    """Token ids and the images that they hold, each in its first grid."""
    return ImagePrompt(tokens.astype(np.int32), [image.placed() for image in images])


def read_images(
    run: str, tensors: Mapping[str, Array], prompts: Array, config: ModelConfig
) -> list[tuple[GoldenImage, ...]]:
    """The images of each of the run's prompts [B, n], which share their numbers: those of the first come first.

    ValueError, in one line that names the tensor, for what does not fit.
    """
    named = [re.fullmatch(rf"{run}\.image(\d+)\.patches", key) for key in tensors]
    numbers = sorted(int(match[1]) for match in named if match is not None)
    lines = _token_types(run, tensors, prompts, config.image_token_id, numbers)
    spans = [(row, *span) for row, line in enumerate(lines) for span in _spans(line)]
    if len(spans) != len(numbers):
        raise ValueError(f"{run}: expected patches of each of {len(spans)} spans, got those of {len(numbers)} images")
    found: list[list[GoldenImage]] = [[] for _ in prompts]
    for (row, begin, types), number in zip(spans, numbers, strict=True):
        ids = prompts[row, begin : begin + len(types)]
        if (ids != config.image_token_id).any():
            wrong = int(np.argmax(ids != config.image_token_id))
            wanted = f"expected the image token {config.image_token_id}, got {ids[wrong]}"
            raise ValueError(f"{run}.ids: position {begin + wrong}: {wanted}")
        found[row].append(_image(run, number, tensors, begin, types, config))
    return [tuple(images) for images in found]


def _image(
    run: str, number: int, tensors: Mapping[str, Array], begin: int, types: Array, config: ModelConfig
) -> GoldenImage:
    """The image of a number, whose span has these types from a position on."""
    rules = Rules.of(config.to_flat())
    if rules is None:
        raise ValueError(f"{run}: it holds images, and the model has no vision tower")
    name = f"{run}.image{number}"
    told = tensors.get(f"{name}.types")
    if told is not None and not np.array_equal(told.reshape(-1), types):
        raise ValueError(f"{name}.types: expected those of {run}.token_types from position {begin}, got others")
    patches = _rows(f"{name}.patches", tensors[f"{name}.patches"], 3 * rules.patch**2)
    rows, columns = _places(run, begin, types)
    grids = patch_grids(rows, columns, len(patches), rules)
    if not grids:
        raise ValueError(f"{name}.patches: expected those of {rows} x {columns} rows of the tower, got {len(patches)}")
    tower = _tower(run, number, tensors, (len(patches), config.vision_dim), (rows * columns, config.dim))
    return GoldenImage(begin, patches.astype(np.float32), grids, tower)


def patch_grids(rows: int, columns: int, patches: int, rules: Rules) -> tuple[Grid, ...]:
    """Grids of so many patches of which the tower makes `rows` x `columns`, those first that an image is cut into."""
    fitting = [
        Grid(height, patches // height, rules.merged)
        for height in range(1, rows * rules.merged + 1)
        if patches % height == 0
    ]
    fitting = [grid for grid in fitting if grid.places == (rows, columns)]
    side = rules.patch
    return tuple(sorted(fitting, key=lambda grid: rules.grid(grid.columns * side, grid.rows * side) != grid))


def _token_types(run: str, tensors: Mapping[str, Array], prompts: Array, image_token: int, numbers: list[int]) -> Array:
    """Types [B, n] of the prompts' positions; where the run has none, those of its images in the place of their ids."""
    count = prompts.shape[1]
    given = tensors.get(f"{run}.token_types")
    if given is not None:
        if given.size % len(prompts) or given.size // len(prompts) < count:
            raise ValueError(f"{run}.token_types: expected [{len(prompts)}, {count}], got {list(given.shape)}")
        return given.reshape(len(prompts), -1)[:, :count]
    inside = prompts == image_token
    types = [tensors[f"{run}.image{number}.types"].reshape(-1) for number in numbers]
    if sum(map(len, types)) != inside.sum():
        raise ValueError(f"{run}.ids: expected {sum(map(len, types))} positions of images, got {inside.sum()}")
    lines = np.full(prompts.shape, TEXT)
    lines[inside] = np.concatenate(types)
    return lines


def _spans(line: Array) -> Iterator[tuple[int, Array]]:
    """Where each span begins, and its types: up to the next end, or to where it is cut off."""
    for begin in np.flatnonzero(line == START):
        ends = np.flatnonzero(line[begin:] == END)
        yield int(begin), line[begin : begin + (int(ends[0]) + 1 if len(ends) else len(line))]


def _places(run: str, begin: int, types: Array) -> tuple[int, int]:
    """Rows and columns of the tower's result, from the types of a span."""
    rows = int((types == NEWLINE).sum())
    columns = int((types == IMAGE).sum()) // max(1, rows)
    expected = [START, *([IMAGE] * columns + [NEWLINE]) * rows, END]
    if not columns or types.tolist() != expected:
        raise ValueError(
            f"{run}: types of the span from position {begin}: expected start (0), rows of image positions (1), all as "
            f"long, that end with a newline (2), and end (3), got {' '.join(map(str, types.tolist()[:40]))}"
        )
    return rows, columns


def _rows(name: str, tensor: Array, width: int) -> Array:
    """A tensor as rows of a width, of whichever shape it is."""
    for tail in range(1, tensor.ndim):
        if np.prod(tensor.shape[tail:]) == width:
            return tensor.reshape(-1, width)
    raise ValueError(f"{name}: expected rows of {width}, got {list(tensor.shape)}")


def _tower(run: str, number: int, tensors: Mapping[str, Array], *shapes: tuple[int, int]) -> dict[str, Array]:
    """Landmarks of the tower that are recorded of an image."""
    found = {}
    for (what, landmark), (rows, width) in zip(_TOWER.items(), shapes, strict=True):
        name = f"{run}.p.{what}.{number}"
        if name in tensors:
            found[landmark] = _rows(name, tensors[name], width)
            if len(found[landmark]) != rows:
                raise ValueError(f"{name}: expected {rows} rows, got {list(tensors[name].shape)}")
    return found
