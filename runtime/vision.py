"""Images in prompts: where their spans stand, and what the vision tower of an engine makes of them.

Every position of a span carries the image token. What stands in the place of its embedding is a row of the tower or one
of three learned delimiters; a step is told which, and given the rows (`PlaceImages`).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, overload
from weakref import WeakKeyDictionary

import numpy as np

from v41c.errors import UsageError
from v41c.runtime.artifact import Engine
from v41c.runtime.images import Ints, Picture, Rules, make_picture, read_picture, read_pixels
from v41c.runtime.states import Array, as_bf16
from v41c.runtime.text import Text

#: what stands for an image in the text of a prompt
PLACEHOLDER = "<image>"
#: what stands at a position of no image
TEXT = -1
#: the outputs that are asked for of a run of a graph, by name
Execute = Callable[[str, Mapping[str, Array], Sequence[str]], Mapping[str, Array]]


@dataclass(frozen=True, eq=False)
class Placed:
    """A picture whose span begins at a position of a sequence, which may lie before its first."""

    picture: Picture
    begin: int

    @property
    def end(self) -> int:
        """The position after the span."""
        return self.begin + self.picture.grid.span_tokens

    def moved(self, by: int) -> Placed:
        """The same, so many positions on."""
        return Placed(self.picture, self.begin + by)


class ImagePrompt(Sequence[int]):
    """Token ids i32 [T] and the images whose spans they hold, counted from the first. A slice keeps what it holds."""

    def __init__(self, tokens: Ints, images: Sequence[Placed]) -> None:
        self.tokens = tokens
        self.images = tuple(image for image in images if image.begin < len(tokens) and image.end > 0)

    def __len__(self) -> int:
        return len(self.tokens)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> ImagePrompt: ...
    def __getitem__(self, index: int | slice) -> int | ImagePrompt:
        if isinstance(index, int):
            return int(self.tokens[index])
        begin, end, step = index.indices(len(self.tokens))
        if step != 1:
            raise IndexError("a prompt with images: expected a slice of consecutive tokens")
        return ImagePrompt(self.tokens[begin:end], [image.moved(-begin) for image in self.images])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.array(self.tokens, dtype, copy=copy)


def images_of(tokens: object) -> tuple[Placed, ...]:
    """The images of a prompt, none of plain token ids."""
    return tokens.images if isinstance(tokens, ImagePrompt) else ()


def image_rules(engine: Engine) -> Rules:
    """How the model of an engine takes images. UsageError when it takes none."""
    rules = Rules.of(engine.manifest.config)
    if rules is None:
        raise UsageError(f"{engine.path}: expected a model with a vision tower: this one takes no images")
    return rules


def image_token(engine: Engine) -> int | None:
    """The token that stands for an image in a prompt, None of a model that takes none."""
    config: Mapping[str, Any] = engine.manifest.config
    return int(config["image_token_id"]) if Rules.of(config) else None


def encode(text: Text, prompt: str, engine: Engine) -> list[int]:
    """Token ids of a text in which each `<image>` stands for an image: plain text to a model that takes none."""
    token = image_token(engine)
    if token is None or PLACEHOLDER not in prompt:
        return text.encode(prompt)
    parts = [text.pieces(part) for part in prompt.split(PLACEHOLDER)]
    return text.begun([id for part in parts for id in (token, *part)][1:])


def with_images(tokens: Sequence[int], pictures: Sequence[Picture], engine: Engine) -> ImagePrompt:
    """Token ids with the span of an image in the place of each image token, pictures in order.

    UsageError when there are not as many of one as of the other, or the model takes no images.
    """
    image_rules(engine)
    token, ids = image_token(engine), np.asarray(tokens, np.int32)
    places = np.flatnonzero(ids == token)
    if len(places) != len(pictures):
        raise UsageError(
            f"prompt: expected an image for each {PLACEHOLDER}, got {len(pictures)} for {len(places)} of them"
        )
    parts: list[Ints] = []
    placed: list[Placed] = []
    begin = length = 0
    for picture, place in zip(pictures, places, strict=True):
        span = np.full(picture.grid.span_tokens, token, np.int32)
        parts += [ids[begin:place], span]
        length += int(place) - begin
        placed.append(Placed(picture, length))
        length += len(span)
        begin = int(place) + 1
    return ImagePrompt(np.concatenate([*parts, ids[begin:]]), placed)


def with_files(tokens: Sequence[int], files: Sequence[str], engine: Engine) -> Sequence[int]:
    """As `with_images`, of pictures in files; without any, and without an image token, the tokens as they are."""
    return _with(tokens, [partial(read_picture, file) for file in files], engine)


def with_contents(tokens: Sequence[int], contents: Mapping[str, bytes], engine: Engine) -> Sequence[int]:
    """As `with_files`, of what would stand in the files, by names for errors."""

    def read(name: str, rules: Rules) -> Picture:
        return make_picture(read_pixels(contents[name], name), rules)

    return _with(tokens, [partial(read, name) for name in contents], engine)


def _with(tokens: Sequence[int], read: Sequence[Callable[[Rules], Picture]], engine: Engine) -> Sequence[int]:
    token = image_token(engine)
    if not read and (token is None or token not in tokens):
        return tokens
    rules = image_rules(engine)
    return with_images(tokens, [each(rules) for each in read], engine)


def content_keys(prompt: Sequence[int] | Array) -> Ints:
    """i32 [T] that are equal for prompts that mean the same: the token ids, and in spans what the image is, below 0.

    For whoever keeps something by the tokens of a prefix: the image token alone does not say what was seen.
    """
    keys = np.array(prompt, np.int32)
    for image in images_of(prompt):
        for position in range(max(0, image.begin), min(image.end, len(keys))):
            offset = struct.pack("<i", position - image.begin)
            digest = hashlib.sha256(image.picture.digest + offset).digest()
            keys[position] = -1 - (int.from_bytes(digest[:4], "little") >> 1)
    return keys


def tower_inputs(pictures: Sequence[Picture]) -> dict[str, Array]:
    """Inputs of the graph `vision` for pictures in order: patches f32 [T, K], the rest as the graph has it."""
    grids = [picture.grid for picture in pictures]
    ends = np.cumsum([0, *(grid.patches for grid in grids)], dtype=np.int32)
    rows, columns = (np.concatenate(part) for part in zip(*(grid.coordinates() for grid in grids), strict=True))
    counts = [grid.patches for grid in grids]
    sources = [np.where(grid.sources() < 0, -1, grid.sources() + end) for grid, end in zip(grids, ends, strict=False)]
    return {
        "patches": np.concatenate([picture.patches for picture in pictures]),
        "patch_rows": rows,
        "patch_columns": columns,
        "begins": np.repeat(ends[:-1], counts),
        "ends": np.repeat(ends[1:], counts),
        "sources": np.concatenate(sources).astype(np.int32),
    }


def packed(pictures: Sequence[Picture], patches: int, rows: int) -> Iterator[list[Picture]]:
    """Pictures in order, in groups of at most so many patches and rows of the tower: what one step of it takes."""
    group: list[Picture] = []
    for picture in pictures:
        grids = [each.grid for each in (*group, picture)]
        full = sum(grid.patches for grid in grids) > patches or sum(grid.merged_rows for grid in grids) > rows
        if group and full:
            yield group
            group = []
        group.append(picture)
    if group:
        yield group


def place_rows(
    runs: Sequence[tuple[int, int, Sequence[Placed]]], rows_of: Mapping[Picture, Array], none: Array
) -> dict[str, Array]:
    """`image_rows` i32 [T] and `image_values` [I, D] of runs (begin, end, images that they hold), by `PlaceImages`.

    rows_of: what the tower gives of each picture [R, D]. none: [0, D], for runs that hold no image.
    """
    codes, values, count = [], [none], 0
    for begin, end, images in runs:
        line = np.full(end - begin, TEXT, np.int32)
        for image in images:
            first, last = max(begin, image.begin), min(end, image.end)
            span = image.picture.grid.span()[first - image.begin : last - image.begin]
            rows = span[span >= 0]
            if len(rows):
                values.append(rows_of[image.picture][rows[0] : rows[-1] + 1])
                span = np.where(span >= 0, span - rows[0] + count, span)
                count += len(rows)
            line[first - begin : last - begin] = span
        codes.append(line)
    return {"image_rows": np.concatenate(codes), "image_values": np.concatenate(values)}


class Sight:
    """The vision tower of an engine: what steps are given of images. Rows are kept for as long as their picture is."""

    def __init__(self, engine: Engine, execute: Execute) -> None:
        """For an engine that has the graph `vision`."""
        (program,) = engine.programs("vision")
        backbone = [*engine.programs("encoder"), *engine.programs("model")][0]
        values = [*(program.values[i] for i in program.inputs), *(backbone.values[i] for i in backbone.inputs)]
        self._dtypes = {value.name: value.dtype for value in values}
        self._width = int(next(value.shape[1] for value in values if value.name == "image_values"))
        self._program = program
        self._execute = execute
        self._rows: WeakKeyDictionary[Picture, Array] = WeakKeyDictionary()

    def inputs(self, runs: Sequence[tuple[int, int, Sequence[Placed]]]) -> dict[str, Array]:
        """`image_rows` i32 [T] and `image_values` [I, D] of runs: begin, end, and images of the sequence of each."""
        held = [(begin, end, _within(images, begin, end)) for begin, end, images in runs]
        self.look([image.picture for _, _, images in held for image in images])
        none = np.empty((0, self._width), np.uint16 if self._bf16("image_values") else np.float32)
        return place_rows(held, self._rows, none)

    def features(self, pictures: Sequence[Picture]) -> Array:
        """Rows [R, D] of the tower, which is run over all of the pictures in one step."""
        inputs = tower_inputs(pictures)
        if self._bf16("patches"):
            inputs["patches"] = as_bf16(inputs["patches"])
        return self._execute("vision", inputs, ["features"])["features"]

    def look(self, pictures: Sequence[Picture]) -> None:
        """Run the tower over pictures that it has not seen."""
        unseen = list(dict.fromkeys(picture for picture in pictures if picture not in self._rows))
        for group in packed(unseen, self._program.max_tokens, self._program.max_rows):
            features = self.features(group)
            ends = np.cumsum([0, *(picture.grid.merged_rows for picture in group)])
            for picture, (begin, end) in zip(group, pairwise(ends), strict=True):
                self._rows[picture] = features[begin:end].copy()

    def _bf16(self, name: str) -> bool:
        return self._dtypes[name] == "bf16"


def _within(images: Sequence[Placed], begin: int, end: int) -> list[Placed]:
    return [image for image in images if image.begin < end and image.end > begin]
