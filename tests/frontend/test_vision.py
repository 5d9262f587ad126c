"""The vision tower against the same equations in numpy and double precision."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch

import v41c.frontend
from tests.traced import FOLDERS
from v41c.frontend.checkpoint import Checkpoint
from v41c.frontend.model import Model
from v41c.frontend.vision import Patches
from v41c.runtime.images import Grid, Picture
from v41c.runtime.vision import tower_inputs

CASE = "case_00"
Array = np.ndarray


@functools.cache
def model(arithmetic: str) -> Model:
    return v41c.frontend.load(str(FOLDERS[CASE]), arithmetic)


def pictures(*sizes: tuple[int, int]) -> list[Picture]:
    draw = np.random.default_rng(7)
    merged = model("exact").config.vision_downsample_ratio
    return [
        Picture(Grid(rows, columns, merged), draw.uniform(-1, 1, (rows * columns, 588)).astype(np.float32), b"")
        for rows, columns in sizes
    ]


def seen(arithmetic: str, images: list[Picture]) -> Array:
    inputs = {name: torch.from_numpy(array) for name, array in tower_inputs(images).items()}
    inputs["patches"] = inputs["patches"].to(torch.bfloat16 if arithmetic == "release" else torch.float32)
    with torch.inference_mode():
        return model(arithmetic).see(Patches(*inputs.values())).double().numpy()


class Independent:
    """One image at a time, as grids, in f64."""

    def __init__(self) -> None:
        self.config = model("exact").config
        self.checkpoint = Checkpoint(FOLDERS[CASE])

    def weight(self, name: str) -> Array:
        return self.checkpoint.tensor(name).double().numpy()

    def biased(self, name: str, x: Array) -> Array:
        return x @ self.weight(f"{name}.weight").T + self.weight(f"{name}.bias")

    def norm(self, name: str, x: Array) -> Array:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * self.weight(f"{name}.weight")

    def rotated(self, x: Array, grid: Grid) -> Array:
        """[P, H, HD]: pairs (i, i + HD/2), the first half of them by the row, the second by the column."""
        half = x.shape[-1] // 2
        steps = self.config.vision_rope_theta ** -(np.arange(half // 2) / (half // 2))
        angles = np.empty((grid.rows, grid.columns, half))
        angles[..., : half // 2] = np.arange(grid.rows)[:, None, None] * steps
        angles[..., half // 2 :] = np.arange(grid.columns)[None, :, None] * steps
        turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles.reshape(-1, 1, half))
        return np.concatenate([turned.real, turned.imag], -1)

    def attention(self, name: str, x: Array, grid: Grid) -> Array:
        heads, width = self.config.vision_n_heads, self.config.vision_dim // self.config.vision_n_heads
        q, k, v = self.biased(f"{name}.wqkv", x).reshape(-1, 3, heads, width).transpose(1, 0, 2, 3)
        q, k = self.rotated(q, grid), self.rotated(k, grid)
        scores = np.einsum("thd,shd->hts", q, k) / math.sqrt(width)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return self.biased(f"{name}.wo", np.einsum("hts,shd->thd", weights, v).reshape(len(x), -1))

    def mlp(self, name: str, x: Array) -> Array:
        gate, up = np.split(x @ self.weight(f"{name}.w1.weight").T, 2, -1)
        return (gate / (1 + np.exp(-gate)) * up) @ self.weight(f"{name}.w2.weight").T

    def see(self, picture: Picture) -> Array:
        grid, merged = picture.grid, self.config.vision_downsample_ratio
        x = self.biased("vision.patch_embed.proj", picture.patches.astype(np.float64))
        for layer in range(self.config.vision_n_layers):
            name = f"vision.blocks.{layer}"
            x = x + self.attention(f"{name}.attn", self.norm(f"{name}.norm1", x), grid)
            x = x + self.mlp(f"{name}.mlp", self.norm(f"{name}.norm2", x))
        x = self.norm("vision.norm", x).reshape(grid.rows, grid.columns, -1)
        rows, columns = grid.places
        padded = np.zeros((rows * merged, columns * merged, x.shape[-1]))
        padded[: grid.rows, : grid.columns] = x
        blocks = padded.reshape(rows, merged, columns, merged, -1).transpose(0, 2, 4, 1, 3)
        y = self.biased("aligner.w1", blocks.reshape(rows * columns, -1))
        return self.biased("aligner.w2", y * np.vectorize(math.erfc)(-y / math.sqrt(2)) / 2)


@pytest.mark.parametrize("size", [(1, 1), (3, 3), (4, 5), (1, 11), (13, 2), (9, 9)])
def test_the_tower_is_its_equations(size: tuple[int, int]) -> None:
    """In exact arithmetic to f32 rounding; the release's bf16 stays near: eight bits, a few dozen roundings."""
    (picture,) = pictures(size)
    wanted = Independent().see(picture)
    found = seen("exact", [picture])
    assert found.shape == wanted.shape
    assert np.linalg.norm(found - wanted) <= 2e-6 * np.linalg.norm(wanted)
    rounded = seen("release", [picture])
    assert np.linalg.norm(rounded - wanted) <= 2e-2 * np.linalg.norm(wanted)


def test_images_do_not_see_each_other() -> None:
    images = pictures((4, 5), (7, 3), (1, 2), (8, 9))
    together = seen("release", images)
    assert (together == np.concatenate([seen("release", [image]) for image in images])).all()


def test_image_rows_take_the_place_of_embeddings() -> None:
    """Tokens of a span are rows and delimiters: another row, other logits there and after, none before."""
    exact = model("exact")
    c, span = exact.config, 1 + 2 + 1 + 1
    tokens = torch.tensor([5, 6, *[c.image_token_id] * span, 7, 8], dtype=torch.int32)
    codes = torch.tensor([-1, -1, -2, 0, 1, -3, -4, -1, -1], dtype=torch.int32)
    values = torch.from_numpy(np.random.default_rng(1).standard_normal((2, c.dim), np.float32))
    other = values.clone()
    other[1] += 1
    with torch.inference_mode():
        first, second = (exact(tokens, images=(codes, rows)) for rows in (values, other))
        plain = exact(tokens)
        swapped = exact(tokens, images=(torch.tensor([-1, -1, -4, 0, 1, -3, -2, -1, -1], dtype=torch.int32), values))
    # experts take their tokens together, so that sums may come in another order
    near = {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(first[:4], second[:4], **near)
    torch.testing.assert_close(first[:2], plain[:2], **near)
    for left, right in ((first[4:], second[4:]), (first[2], plain[2]), (first[2], swapped[2])):
        assert (left - right).abs().max() > 0.01
