"""Golden runs with images: the eager model meets its own tensors, and no others."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.golden_case import CASE, GRIDS, write_case
from v41c.compare import compare
from v41c.criteria import judge
from v41c.errors import CheckpointError
from v41c.frontend import load
from v41c.frontend.model import Model
from v41c.golden import read_golden
from v41c.golden_images import patch_grids
from v41c.runtime.images import Grid, Rules
from v41c.subject import Arithmetic, EagerSubject

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_case(tmp_path_factory.mktemp("images") / "case")


def altered(case: Path, folder: Path, change: Callable[[Tensors], object]) -> Path:
    """A copy of the case with other tensors."""
    shutil.copytree(case, folder)
    tensors = load_file(folder / "io.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "io.safetensors")
    return folder


def failed(case: Path, arithmetic: Arithmetic, change: Callable[[Model], object] = lambda model: None) -> set[str]:
    """Kinds of tensors of the case that a changed model fails."""
    model = load(str(CASE), arithmetic)
    with torch.no_grad():
        change(model)
    (run,) = read_golden(case, model.config, arithmetic)
    return {verdict.kind for verdict in judge(EagerSubject(model), run) if verdict.passed is False}


def test_the_eager_model_meets_its_own_tensors(case: Path) -> None:
    report = compare(case, golden=case)
    assert report.passed
    assert [v for v in report.verdicts if v.passed is None or v.note] == []
    towers = {
        (v.criterion, v.kind): (v.figure, v.compared) for v in report.verdicts if v.kind in ("vit_out", "features")
    }
    assert towers == dict.fromkeys([(c, kind) for c in (1, 2) for kind in ("vit_out", "features")], (0.0, 2))


def other_layouts(tensors: Tensors) -> None:
    for number in range(2):
        name = f"r0.image{number}"
        tensors[f"{name}.patches"] = tensors[f"{name}.patches"].float().view(1, -1, 588)
        tensors[f"{name}.types"] = tensors[f"{name}.types"].int()[None]
        for what in (f"r0.p.vit_out.{number}", f"r0.p.aligner_out.{number}"):
            tensors[what] = tensors[what].bfloat16()[None]
    # the tokens after the prompt are text
    tensors["r0.token_types"] = torch.cat((tensors["r0.token_types"][0], torch.full((4,), -1))).int()


def test_shapes_may_differ(case: Path, tmp_path: Path) -> None:
    assert failed(altered(case, tmp_path / "case", other_layouts), "release") == set()


@pytest.mark.parametrize("forgotten", [["r0.token_types"], ["r0.image0.types", "r0.image1.types"]])
def test_what_is_said_twice_may_be_missing(case: Path, tmp_path: Path, forgotten: list[str]) -> None:
    folder = altered(case, tmp_path / "case", lambda tensors: [tensors.pop(name) for name in forgotten])
    (run,), (same,) = (read_golden(path, load(str(CASE)).config, "release") for path in (folder, case))
    assert [(image.begin, image.grids) for image in run.images] == [(i.begin, i.grids) for i in same.images]


def swap_patches(tensors: Tensors) -> None:
    tensors["r0.image1.patches"] = tensors["r0.image1.patches"][[1, 0, *range(2, GRIDS[1].patches)]]


def rows_of_another_image(tensors: Tensors) -> None:
    tensors["r0.p.aligner_out.0"] = tensors["r0.p.aligner_out.0"].flip(0)


@pytest.mark.parametrize(
    ("arithmetic", "change", "kinds"),
    [
        ("exact", swap_patches, {"vit_out", "features", "streams", "logits"}),
        ("release", rows_of_another_image, {"features", "in"}),
    ],
)
def test_other_images_fail(
    case: Path, tmp_path: Path, arithmetic: Arithmetic, change: Callable[[Tensors], None], kinds: set[str]
) -> None:
    assert kinds <= failed(altered(case, tmp_path / "case", change), arithmetic)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda model: model.layers[5].ffn.gate.bias_vl.add_(torch.arange(8.0).flip(0)), "experts"),
        (lambda model: model.image_newline.mul_(1.1), "in"),
        (lambda model: model.aligner.w1.bias.add_(0.1), "features"),
    ],
)
def test_other_weights_fail_where_they_are(case: Path, change: Callable[[Model], object], kind: str) -> None:
    found = failed(case, "release", change)
    assert kind in {name.partition(",")[0] for name in found}
    # each sublayer is fed golden tensors; experts change what comes of them
    assert len(found) <= 3


def test_what_does_not_fit_is_one_line(case: Path, tmp_path: Path) -> None:
    def line(name: str, change: Callable[[Tensors], object]) -> str:
        folder = altered(case, tmp_path / name, change)
        with pytest.raises(CheckpointError) as caught:
            compare(case, golden=folder)
        return str(caught.value).removeprefix(f"{folder}: expected golden tensors of this model, found others: ")

    def put(name: str, place: int, value: int) -> Callable[[Tensors], object]:
        return lambda tensors: tensors[name].view(-1).__setitem__(place, value)

    assert line("a", put("r0.ids", 9, 7)) == "r0.ids: position 9: expected the image token 511, got 7"
    assert line("b", put("r0.token_types", 10, 1)).startswith(
        "r0.image0.types: expected those of r0.token_types from position 7, got others"
    )
    assert line("c", lambda tensors: tensors.pop("r0.image1.patches")) == (
        "r0: expected patches of each of 2 spans, got those of 1 images"
    )
    assert line("d", lambda t: t.update({"r0.image1.patches": t["r0.image1.patches"][:19]})) == (
        "r0.image1.patches: expected those of 1 x 3 rows of the tower, got 19"
    )
    assert line("e", lambda t: t.update({"r0.p.vit_out.0": t["r0.p.vit_out.0"][:, :60]})) == (
        "r0.p.vit_out.0: expected rows of 64, got [20, 60]"
    )

    def early_newline(tensors: Tensors) -> None:
        for name, place in (("r0.token_types", 9), ("r0.image0.types", 2)):
            tensors[name].view(-1)[place] = 2

    assert line("f", early_newline) == (
        "r0: types of the span from position 7: expected start (0), rows of image positions (1), all as long, that end "
        "with a newline (2), and end (3), got 0 1 2 2 1 1 2 3"
    )


def test_images_that_were_not_recorded_are_skipped(case: Path, tmp_path: Path) -> None:
    def forget(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith(("r0.image", "r0.token_types"))]:
            del tensors[name]

    model = load(str(CASE))
    (run,) = read_golden(altered(case, tmp_path / "case", forget), model.config, "release")
    assert run.skipped == "its prompt holds images, and what they show was not recorded"


@settings(deadline=None)
@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 4))
def test_the_grid_is_among_those_that_fit(rows: int, columns: int, merged: int) -> None:
    grid = Grid(rows, columns, merged)
    found = patch_grids(*grid.places, grid.patches, Rules(14, merged, 400, 196))
    assert grid in found
    assert all(other.places == grid.places and other.patches == grid.patches for other in found)
    if rows % merged == 0 and columns % merged == 0:
        assert found == (grid,)


def test_a_grid_that_no_image_is_cut_into_comes_last() -> None:
    flat, square = Grid(5, 12, 4), Grid(6, 10, 4)
    assert patch_grids(2, 3, 60, Rules(14, 4, 400, 196)) == (flat, square)
    # the flat one would be squeezed
    assert patch_grids(2, 3, 60, Rules(14, 4, 400, 196, max_wh_ratio=2.0)) == (square, flat)
