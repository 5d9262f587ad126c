"""Engines of one model with any subset of the passes, for the price of one: they share the trace and every kernel."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.variants import compile_variants
from v41c import compile as driver
from v41c.codegen.kernel import Kernel
from v41c.compile import CompileOptions
from v41c.init import init
from v41c.passes.pipeline import REQUIRED, pass_names
from v41c.runtime.artifact import load
from v41c.runtime.session import Session

#: passes that may be left out, in order
OPTIONAL = tuple(name for name in pass_names() if name not in REQUIRED)


class Subsets:
    """A random model with every feature - compressed sources, an Engram, a draft head - and its engines."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        self._kernels: dict[str, Kernel] = {}
        init(folder / "model", "tiny", 3)
        compile_variants(patch, (1, 24))

    def steps(self, passes: tuple[str, ...]) -> dict[str, np.ndarray]:
        """Logits of two chunks, of single tokens, of a chunk behind them, and of a draft block; the final states."""
        options = CompileOptions(passes=",".join((*REQUIRED, *passes)), max_context=128)
        driver.compile(self._folder / "model", self._folder / "engine", options, kernels=self._kernels)
        engine = load(self._folder / "engine")
        tokens = np.random.default_rng(3).integers(5, engine.manifest.vocabulary - 4, 76)
        session = Session(engine, drafting=True, poison=True)
        found = {"chunks": session.prefill_all(tokens[:41], mode="full")}
        found["single"] = np.stack([session.decode(int(token)) for token in tokens[41:59]])
        found["draft"] = session.draft({0: 7}, logits=True)[0].logits
        found["behind"] = session.prefill_all(tokens[59:], mode="full")
        return found | {name: array.copy() for name, array in session.states.items()}
