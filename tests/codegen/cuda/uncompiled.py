"""CUDA engines whose cubins hold nothing but their names: for what looks at launches or interprets them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from v41c.codegen.cuda import build
from v41c.compile import CompileOptions, compile
from v41c.targets import cuda

#: tokens of the programs besides those for one: enough for a prompt of a few
FEW = 16
CONTEXT = 64


def compile_uncompiled(
    checkpoint: Path, engine: Path, passes: str = "all", target: cuda.CudaTarget = cuda.SM_90
) -> None:
    """An engine without machine code, of up to `CONTEXT` tokens in steps of up to `FEW`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("v41c.targets.target.find_target", lambda spec: replace(target, variants=(1, FEW)))
        patch.setattr(build, "_compile", _uncompiled)
        patch.setenv("XDG_CACHE_HOME", str(engine.parent / "cache"))
        compile(checkpoint, engine, CompileOptions(target="cuda", passes=passes, max_context=CONTEXT))


def _uncompiled(entries: list[build._Entry]) -> Iterator[str]:
    for entry in entries:
        key = entry.function.key()
        entry.store(build.Cubin(entry.function.name, entry.function.warps, 0, 32, 0, {}), key.encode())
        yield key
