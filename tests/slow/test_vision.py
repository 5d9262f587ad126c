"""The vision tower of an engine against the eager model, over two hundred sizes of images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import v41c.frontend
from tests.vision_model import IMAGE, checkpoint_and_engine, floats, picture, seen
from v41c.frontend.model import Model
from v41c.runtime.artifact import Engine, load
from v41c.runtime.devices import open_device
from v41c.runtime.images import Picture
from v41c.runtime.vision import Sight, with_images

#: images of a group, and groups
_EACH, _GROUPS = 5, 40


def rows_of(engine: Engine, pictures: list[Picture]) -> np.ndarray:
    device = open_device(engine, 1, 256, threads=None, poison=True, saved_tokens=0)
    sight = Sight(engine, lambda graph, inputs, read: device.execute(graph, inputs, read=read))
    prompt = with_images([IMAGE] * len(pictures), pictures, engine)
    return floats(sight.inputs([(0, len(prompt), prompt.images)])["image_values"])


@pytest.mark.parametrize("arithmetic", ["exact", "release"])
def test_every_size_of_image(arithmetic: str, tmp_path: Path) -> None:
    """Exact: sums in f32 in another order.

    Release: what roundings to bf16 do, for which exact arithmetic is the yardstick: the engine is no farther from the
    eager model than twice as far as that is from itself in exact arithmetic.
    """
    checkpoint, folder = checkpoint_and_engine(tmp_path, arithmetic)  # type: ignore[arg-type]
    engine, model = load(folder), v41c.frontend.load(str(checkpoint), arithmetic)
    exact: Model = v41c.frontend.load(str(checkpoint), "exact")
    draw = np.random.default_rng(11)
    for group in range(_GROUPS):
        sizes = np.exp(draw.uniform(0, 7, (_EACH, 2))).astype(int)
        pictures = [picture(1000 * group + number, *map(int, size)) for number, size in enumerate(sizes)]
        found, wanted = rows_of(engine, pictures), seen(model, pictures).float().numpy()
        distance = np.linalg.norm(found - wanted)
        if arithmetic == "exact":
            assert distance <= 1e-5 * np.linalg.norm(wanted), sizes
        else:
            assert distance <= 2 * np.linalg.norm(seen(exact, pictures).numpy() - wanted), sizes
