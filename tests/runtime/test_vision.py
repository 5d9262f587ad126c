"""Prompts with images: spans in the place of placeholders, slices, keys, and what a step of the tower is given."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.vision_model import CONFIG, IMAGE, picture
from v41c.errors import UsageError
from v41c.runtime.images import Picture
from v41c.runtime.vision import ImagePrompt, content_keys, images_of, packed, tower_inputs, with_files, with_images

ENGINE: object = SimpleNamespace(path=Path("engine"), manifest=SimpleNamespace(config=CONFIG))
BLIND: object = SimpleNamespace(path=Path("engine"), manifest=SimpleNamespace(config={"vision_n_layers": 0}))
PICTURES = [picture(seed, *size) for seed, size in enumerate(((56, 56), (60, 100), (1, 1), (130, 50)))]


def prompt(tokens: list[int], *pictures: Picture) -> ImagePrompt:
    return with_images(tokens, pictures, ENGINE)  # type: ignore[arg-type]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.one_of(st.integers(0, 99), st.integers(0, 3).map(lambda k: -1 - k)), max_size=12))
def test_every_image_token_becomes_the_span_of_its_image(entries: list[int]) -> None:
    """Negative entries stand for pictures: text stays in order, spans lie where placeholders were."""
    pictures = [PICTURES[-1 - entry] for entry in entries if entry < 0]
    found = prompt([IMAGE if entry < 0 else entry for entry in entries], *pictures)
    wanted = [t for e in entries for t in ([IMAGE] * PICTURES[-1 - e].grid.span_tokens if e < 0 else [e])]
    assert list(found) == wanted
    assert np.asarray(found).tolist() == wanted
    assert [image.picture for image in found.images] == pictures
    inside = [p for image in found.images for p in range(image.begin, image.end)]
    assert inside == [place for place, token in enumerate(wanted) if token == IMAGE]


def test_slices_keep_what_they_hold() -> None:
    whole = prompt([1, IMAGE, 2, IMAGE, 3], *PICTURES[:2])
    first, second = whole.images
    for begin in range(len(whole) + 1):
        for end in range(begin, len(whole) + 1):
            part = whole[begin:end]
            assert list(part) == list(whole)[begin:end]
            held = [image for image in (first, second) if image.begin < end and image.end > begin]
            assert [image.picture for image in part.images] == [image.picture for image in held]
            assert [image.begin + begin for image in part.images] == [image.begin for image in held]
    assert whole[0] == 1
    with pytest.raises(IndexError, match="expected a slice of consecutive tokens"):
        whole[::2]


def test_keys_tell_images_apart_and_prompts_alike() -> None:
    plain = content_keys([1, 2, 3])
    assert plain.tolist() == [1, 2, 3]
    tokens = [1, IMAGE, 2]
    first = content_keys(prompt(tokens, PICTURES[0]))
    assert (first == content_keys(prompt(tokens, PICTURES[0]))).all()
    assert (first[[0, -1]] == [1, 2]).all()
    assert (first[1:-1] < 0).all()
    other = content_keys(prompt(tokens, picture(9, 56, 56)))
    assert (first[1:-1] != other[1:-1]).all()
    assert len(set(first.tolist())) == len(first)
    whole = prompt([5, *tokens], PICTURES[0])
    assert (content_keys(whole)[1:] == first).all()
    assert (content_keys(whole[4:]) == content_keys(whole)[4:]).all()


def test_the_tower_is_given_images_one_after_the_other() -> None:
    inputs = tower_inputs(PICTURES)
    counts = [each.grid.patches for each in PICTURES]
    ends = np.cumsum(counts)
    assert inputs["patches"].shape == (ends[-1], 588)
    assert inputs["begins"].tolist() == np.repeat(ends - counts, counts).tolist()
    assert inputs["ends"].tolist() == np.repeat(ends, counts).tolist()
    assert len(inputs["sources"]) == sum(each.grid.merged_rows for each in PICTURES)
    sources = inputs["sources"]
    assert sorted(sources[sources >= 0]) == list(range(ends[-1]))
    assert all(array.dtype == np.int32 for name, array in inputs.items() if name != "patches")


def test_groups_keep_order_and_stay_within_a_step() -> None:
    counts = [(each.grid.patches, each.grid.merged_rows) for each in PICTURES]
    for patches, rows in ((16, 99), (60, 99), (1000, 4), (1000, 1000)):
        groups = list(packed(PICTURES, patches, rows))
        assert [each for group in groups for each in group] == PICTURES
        for group in groups:
            total = [sum(counts[PICTURES.index(each)][axis] for each in group) for axis in (0, 1)]
            assert len(group) == 1 or (total[0] <= patches and total[1] <= rows)
    assert len(list(packed(PICTURES, 1000, 1000))) == 1


def test_prompts_without_images_are_left_as_they_are() -> None:
    for engine in (ENGINE, BLIND):
        assert with_files([1, 2], [], engine) == [1, 2]  # type: ignore[arg-type]
    assert with_files([IMAGE], [], BLIND) == [IMAGE]  # type: ignore[arg-type]
    assert images_of([1, 2]) == ()


def test_what_does_not_match_is_refused() -> None:
    for tokens, count in (([1, 2], 1), ([IMAGE], 0), ([IMAGE, IMAGE, 1], 1)):
        places = tokens.count(IMAGE)
        wanted = f"prompt: expected an image for each <image>, got {count} for {places} of them"
        with pytest.raises(UsageError, match=wanted):
            prompt(tokens, *PICTURES[:count])
    with pytest.raises(UsageError, match="engine: expected a model with a vision tower: this one takes no images"):
        with_images([1], PICTURES[:1], BLIND)  # type: ignore[arg-type]
