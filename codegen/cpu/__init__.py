"""CPU kernels, written in TIR: one file per operation, found by name."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from v41c.codegen.backend import Built, Workshop
from v41c.codegen.kernel import CpuKernel
from v41c.errors import UnsupportedError
from v41c.ir.types import DType
from v41c.manifest import KERNELS_FILE

if TYPE_CHECKING:
    from v41c.ir.op import Op
    from v41c.ir.types import TensorType
    from v41c.targets.target import CpuTarget


def has_kernel(name: str) -> bool:
    """Whether there is a kernel file for the operation of this name."""
    return find_spec(f"v41c.codegen.cpu.{name}") is not None


def needs_packed(op: Op, operands: Sequence[TensorType | None]) -> bool:
    """Whether an operation makes or takes packed rows of activations, which no CPU kernel does."""
    kinds = zip((declared.name for declared in op.operands()), operands, strict=True)
    takes = any(name in op.packable and kind is not None and kind.dtype == DType.U8 for name, kind in kinds)
    return takes or bool(op.attributes().get("packed"))


def kernel_for(
    op: Op,
    operands: Sequence[TensorType | None],
    results: Sequence[TensorType],
    target: CpuTarget,
    bounds: Mapping[str, int],
) -> CpuKernel:
    """The kernel of `op` at these types on `target`.

    `bounds` is the largest value of each symbolic dimension that this variant will meet; a variant with T ≤ 1 is made
    for single tokens. UnsupportedError names operation, target and reason.
    """
    if not has_kernel(op.name()):
        raise UnsupportedError(f"{op.name()} on {target.name}: no kernel; expected codegen/cpu/{op.name()}.py")
    if needs_packed(op, operands):
        raise UnsupportedError(f"{op.name()} on {target.name}: activations: expected bf16 or f32, got packed rows")
    module = importlib.import_module(f"v41c.codegen.cpu.{op.name()}")
    kernel = module.kernel(op, tuple(operands), tuple(results), target, bounds)
    if not isinstance(kernel, CpuKernel):
        raise UnsupportedError(f"{op.name()} on {target.name}: kernel(): expected a CpuKernel, got {type(kernel)}")
    return kernel


def build_kernels(
    kernels: Sequence[CpuKernel], target: CpuTarget, dims: Sequence[str], folder: Path, workshop: Workshop
) -> Built:
    """One shared library of all kernels."""
    from v41c.codegen.cpu.build import build_library

    library = folder / KERNELS_FILE
    library.parent.mkdir()
    build_library(kernels, target, library, workshop.cache)
    return Built()
