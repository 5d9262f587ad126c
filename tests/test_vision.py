"""Images through an engine: what the tower makes of them, logits of prompts that hold them, and the command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import v41c.frontend
from tests.vision_model import IMAGE, checkpoint_and_engine, floats, noise, picture, placed, seen
from v41c.cli import main
from v41c.frontend.model import Model
from v41c.runtime.artifact import Engine, load
from v41c.runtime.devices import open_device
from v41c.runtime.images import Picture
from v41c.runtime.session import Session
from v41c.runtime.vision import ImagePrompt, Sight, with_images

#: sums in f32 of a few hundred terms in another order, through two layers: measured 6e-7
F32_NOISE = 1e-5


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return checkpoint_and_engine(tmp_path_factory.mktemp("vision"), "exact")


@pytest.fixture(scope="module")
def engine(folders: tuple[Path, Path]) -> Engine:
    return load(folders[1])


@pytest.fixture(scope="module")
def model(folders: tuple[Path, Path]) -> Model:
    return v41c.frontend.load(str(folders[0]), "exact")


def relative(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def tower(engine: Engine, pictures: list[Picture]) -> np.ndarray:
    """Rows of pictures f32 [R, D], which one step of the text model would be given."""
    device = open_device(engine, 1, 256, threads=None, poison=True, saved_tokens=0)
    sight = Sight(engine, lambda graph, inputs, read: device.execute(graph, inputs, read=read))
    prompt = with_images([IMAGE] * len(pictures), pictures, engine)
    return floats(sight.inputs([(0, len(prompt), prompt.images)])["image_values"])


def test_the_towers_rows_are_the_eager_models(engine: Engine, model: Model) -> None:
    """Five grids, a single patch and whole and broken blocks among them, all in as many steps as they need."""
    pictures = [picture(seed, *size) for seed, size in enumerate(((56, 56), (1, 1), (500, 9), (70, 100), (42, 84)))]
    assert relative(tower(engine, pictures), seen(model, pictures).numpy()) <= F32_NOISE


def prompt_of(engine: Engine) -> ImagePrompt:
    pictures = [picture(1, 70, 56), picture(2, 90, 60)]
    return with_images([0, 7, IMAGE, 9, 10, IMAGE, 11], pictures, engine)


def test_prompts_with_images_have_the_eager_models_logits(engine: Engine, model: Model) -> None:
    prompt = prompt_of(engine)
    with torch.inference_mode():
        wanted = model(torch.from_numpy(prompt.tokens), images=placed(model, prompt)).numpy()
        blind = model(torch.from_numpy(prompt.tokens)).numpy()
    found = Session(engine).prefill_all(prompt, mode="full")
    assert relative(found, wanted) <= F32_NOISE
    assert relative(blind, wanted) > 0.05


def test_spans_may_be_cut_by_steps_and_slots(engine: Engine) -> None:
    """To the bit the same logits, an image seen once: in chunks of any length, and continued by slices."""
    prompt, session = prompt_of(engine), Session(engine)
    whole = session.prefill_all(prompt, mode="full")
    patches = sum(image.picture.grid.patches for image in prompt.images)
    assert session.evaluated["vision"] == patches
    for chunk in (1, 3, 7):
        session.reset()
        assert (session.prefill_all(prompt, mode="full", chunk=chunk) == whole).all()
    assert session.evaluated["vision"] == patches
    session.reset()
    cut = prompt.images[0].begin + 4
    first = session.prefill_all(prompt[:cut], mode="full")
    rest = session.prefill_all(prompt[cut:], mode="full")
    assert (np.concatenate([first, rest]) == whole).all()


def test_another_image_has_other_logits(engine: Engine) -> None:
    first, other = (
        Session(engine).prefill(with_images([0, IMAGE, 7], [picture(seed, 60, 60)], engine)) for seed in (1, 2)
    )
    assert np.abs(first - other).max() > 0.01


def image_file(path: Path, seed: int) -> str:
    Image.fromarray(noise(seed, 80, 50)).save(path)
    return str(path)


def test_the_command_line_takes_images(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: str) -> dict:
        assert main(["run", str(folders[1]), "--max-new-tokens", "3", "--json", *arguments]) == 0
        return json.loads(capsys.readouterr().out)

    a, b = image_file(tmp_path / "a.png", 1), image_file(tmp_path / "b.webp", 2)
    asked = run("--image", a, "--image", b, "--prompt", "see <image> and <image>")
    assert (
        asked["prompt_tokens"]
        == run("--image", b, "--image", a, "--prompt", "see <image> and <image>")["prompt_tokens"]
    )
    alone = run("--image", a, "--tokens", f"5,{IMAGE}")
    # 50 x 80 pixels: 4 x 6 patches, 2 x 2 rows: start, two rows and newlines, end
    assert alone["prompt_tokens"] == 1 + (1 + 2 * 3 + 1)
    lines = tmp_path / "prompts.jsonl"
    lines.write_text(json.dumps({"tokens": [5, IMAGE], "images": [a]}) + "\n")
    assert main(["run", str(folders[1]), "--max-new-tokens", "3", "--prompts", str(lines)]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == alone["tokens"]


def test_what_does_not_match_is_refused_in_one_line(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = image_file(tmp_path / "a.png", 1)
    damaged = tmp_path / "cut.png"
    damaged.write_bytes((tmp_path / "a.png").read_bytes()[:3000])
    for arguments, message in (
        (
            ["--image", a, "--prompt", "<image><image>"],
            "prompt: expected an image for each <image>, got 1 for 2 of them",
        ),
        (["--image", a, "--prompt", "see"], "prompt: expected an image for each <image>, got 1 for 0 of them"),
        (["--prompt", "see <image>"], "prompt: expected an image for each <image>, got 0 for 1 of them"),
        (["--image", str(damaged), "--prompt", "<image>"], f"{damaged}: expected a whole image, got a damaged one"),
        (["--image", "absent.png", "--prompt", "<image>"], "absent.png: cannot be read: No such file or directory"),
    ):
        assert main(["run", str(folders[1]), *arguments]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
