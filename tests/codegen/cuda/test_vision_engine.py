"""A CUDA engine sees images, on the driver of `test_engine`: it has the CPU engine's logits but for roundings."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.codegen.cuda.driver import HostDriver
from tests.codegen.cuda.uncompiled import compile_uncompiled
from tests.vision_model import IMAGE, checkpoint_and_engine, picture
from v41c.runtime import devices
from v41c.runtime.artifact import load
from v41c.runtime.session import Session
from v41c.runtime.vision import with_images

#: relative L2 of logits: measured 0.004
ROUNDINGS = 0.02


def test_prompts_with_images_have_the_cpu_engines_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, engine = checkpoint_and_engine(tmp_path)
    compile_uncompiled(checkpoint, tmp_path / "cuda")
    ours, theirs = load(engine), load(tmp_path / "cuda")
    prompt = with_images([0, 7, IMAGE, 9, IMAGE], [picture(1, 56, 60), picture(2, 40, 60)], ours)
    wanted = Session(ours, poison=True).prefill_all(prompt, mode="full")
    monkeypatch.setattr(devices, "CudaDriver", lambda: HostDriver(theirs))
    session = Session(theirs, poison=True)
    found = session.prefill_all(prompt, mode="full", chunk=13)
    assert np.linalg.norm(found - wanted) <= ROUNDINGS * np.linalg.norm(wanted)
    assert session.evaluated["vision"] == sum(image.picture.grid.patches for image in prompt.images)
