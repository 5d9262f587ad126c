"""How fast the vision tower of an engine is, and the eager one beside it: images of the most patches there can be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from v41c.runtime.artifact import Engine
from v41c.runtime.devices import open_device
from v41c.runtime.images import Picture, make_picture
from v41c.runtime.vision import Sight, image_rules, tower_inputs

if TYPE_CHECKING:
    from v41c.frontend.model import Model

#: what the measurement is called
IMAGES = "images"
#: pixels a side, more than any model takes
_SIDE = 4096


@cache
def sample(engine: Engine) -> Picture:
    """A square image of noise, as large as the model takes them."""
    pixels = np.random.default_rng(0).integers(0, 256, (_SIDE, _SIDE, 3), np.uint8)
    return make_picture(pixels, image_rules(engine))


def engine_tower(engine: Engine) -> Callable[[], object]:
    """Runs the engine's tower over the image."""
    device = open_device(engine, 1, 1, threads=None, poison=False, saved_tokens=0)
    sight = Sight(engine, lambda graph, inputs, read: device.execute(graph, inputs, read=read))
    pictures = [sample(engine)]
    return lambda: sight.features(pictures)


def eager_tower(engine: Engine, model: Model) -> Callable[[], object]:
    """Runs the eager tower, in f32, over the image."""
    import torch

    from v41c.frontend.vision import Patches

    patches = Patches(*map(torch.from_numpy, tower_inputs([sample(engine)]).values()))

    def run() -> object:
        with torch.inference_mode():
            return model.see(patches)

    return run


def images_ratio(images: Mapping[str, float]) -> dict[str, float | None]:
    """How many times faster the engine's tower is than the eager one; empty where either was not measured."""
    return {"images_vs_eager": images["engine"] / images["eager"]} if {"engine", "eager"} <= images.keys() else {}
