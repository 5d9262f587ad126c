"""Engines of one model with any subset of the passes, for the price of one: they share the trace and every kernel."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

import v41c.codegen.cpu as cpu
from v41c import compile as driver
from v41c.codegen.cpu import build
from v41c.codegen.kernel import CpuKernel, kernel_symbol
from v41c.compile import CompileOptions
from v41c.init import init
from v41c.ir.op import Op
from v41c.ir.types import TensorType
from v41c.passes.pipeline import REQUIRED, pass_names
from v41c.runtime.artifact import load
from v41c.runtime.session import Session
from v41c.targets.target import Target

#: passes that may be left out, in order
OPTIONAL = tuple(name for name in pass_names() if name not in REQUIRED)


class Subsets:
    """A random model with every feature - compressed sources, an Engram, a draft head - and its engines."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        self._checkpoint = folder / "model"
        init(self._checkpoint, "tiny", 3)
        patch.setattr(driver, "VARIANTS", (1, 24))
        module = driver.trace_source(driver.read_source(self._checkpoint, no_weights=False))
        patch.setattr(driver, "trace_source", lambda source: module)
        _share_kernels(patch)

    def steps(self, passes: tuple[str, ...]) -> dict[str, np.ndarray]:
        """Logits of two chunks, of single tokens, of a chunk behind them, and of a draft block; the final states."""
        engine_folder = self._folder / "engine"
        options = CompileOptions(passes=",".join((*REQUIRED, *passes)), max_context=128)
        driver.compile(self._checkpoint, engine_folder, options)
        engine = load(engine_folder)
        tokens = np.random.default_rng(3).integers(5, engine.manifest.vocabulary - 4, 76)
        session = Session(engine, drafting=True, poison=True)
        found = {"chunks": session.prefill_all(tokens[:41], mode="full")}
        found["single"] = np.stack([session.decode(int(token)) for token in tokens[41:59]])
        found["draft"] = session.draft(7).logits
        found["behind"] = session.prefill_all(tokens[59:], mode="full")
        return found | {name: array.copy() for name, array in session.states.items()}


def _share_kernels(patch: pytest.MonkeyPatch) -> None:
    made: dict[str, CpuKernel] = {}
    select, compile_object = cpu.kernel_for, build.compile_object

    def kernel_for(
        op: Op,
        operands: tuple[TensorType | None, ...],
        results: tuple[TensorType, ...],
        target: Target,
        bounds: Mapping[str, int],
    ) -> CpuKernel:
        symbol = kernel_symbol(op, operands, results, bounds)
        if symbol not in made:
            made[symbol] = select(op, operands, results, target, bounds)
        return made[symbol]

    objects: dict[str, bytes] = {}

    def compile_once(kernel: CpuKernel, target: Target, path: Path) -> None:
        if kernel.symbol not in objects:
            compile_object(kernel, target, path)
            objects[kernel.symbol] = path.read_bytes()
        path.write_bytes(objects[kernel.symbol])

    patch.setattr(cpu, "kernel_for", kernel_for)
    patch.setattr(build, "compile_object", compile_once)
