"""Engines with every pass against engines with none that may be left out: the same bits, in fewer launches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.traced import FOLDERS
from v41c.passes.pipeline import REQUIRED, pass_names
from v41c.runtime.artifact import Engine, load
from v41c.runtime.session import Session

PLAIN = ",".join(f"-{name}" for name in pass_names() if name not in REQUIRED)
#: launches of a reuse-mode layer at most, by the tokens of the program
MOST = {1: 12, 512: 16}
Engines = Callable[..., Path]


def steps(engine: Engine) -> list[np.ndarray]:
    """Logits of a prefill, of single tokens, and of a short chunk behind them."""
    tokens = np.random.default_rng(3).integers(5, engine.manifest.vocabulary, 140).astype(np.int32)
    session = Session(engine)
    found = [session.prefill_all(tokens[:97], mode="full")]
    found += [session.decode(int(token)) for token in tokens[97:120]]
    found.append(session.prefill_all(tokens[120:], mode="full"))
    return [np.array(logits) for logits in found]


@pytest.mark.parametrize("case", sorted(FOLDERS))
def test_passes_move_no_bit(case: str, engine_of: Engines) -> None:
    fused, plain = (load(engine_of(FOLDERS[case], "release", passes)) for passes in ("all", PLAIN))
    for ours, theirs in zip(steps(fused), steps(plain), strict=True):
        assert np.isfinite(ours).all()
        assert ours.tobytes() == theirs.tobytes()


def test_launches_of_a_layer(engine_of: Engines) -> None:
    """The trained checkpoint: layers 7, 9 and 11 reuse rows and selection in the decoder, 3 and 5 in the encoder."""
    programs = load(engine_of(FOLDERS["tiny-v41"], "release")).manifest.programs
    for program in programs:
        layers = Counter(".".join(command.origin.split(".")[:2]) for command in program.commands)
        for layer in (3, 5, 7, 9, 11):
            assert layers[f"layers.{layer}"] <= MOST[program.max_tokens]
