"""Traced models of the golden cases and of the trained checkpoint, each traced once for all tests."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from v41c.compile import Source, read_source
from v41c.frontend.presets import TRAINED_CHECKPOINT
from v41c.ir.graph import Module
from v41c.passes import remove_quantization
from v41c.passes.context import PassContext
from v41c.subject import Arithmetic
from v41c.traces import kept_trace

GOLDEN = Path(__file__).parent / "data" / "golden"
CASES = tuple(sorted(folder.name for folder in GOLDEN.glob("case_*")))
FOLDERS = {**{case: GOLDEN / case for case in CASES}, "tiny-v41": TRAINED_CHECKPOINT}


def no_kernel(*_: object) -> None:
    """The kernel of a pass that selects none."""
    raise AssertionError("a pass before kernel selection asked for a kernel")


def context(arithmetic: Arithmetic) -> PassContext:
    """What passes before kernel selection are told."""
    return PassContext(arithmetic, no_kernel, (1, 512))  # type: ignore[arg-type]


@cache
def traced(case: str) -> tuple[Source, Module]:
    """A checkpoint and its traced graphs, each traced once."""
    source = read_source(FOLDERS[case], no_weights=False)
    return source, kept_trace(source)


def traced_in(case: str, arithmetic: Arithmetic) -> tuple[Source, Module]:
    """The graphs in an arithmetic: as traced, or after remove-quantization."""
    source, module = traced(case)
    return source, remove_quantization.run(module, context(arithmetic))
