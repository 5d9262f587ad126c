"""CUDA kernels, written in Triton: one file per operation, found by name."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from v41c.codegen.backend import Built, Workshop
from v41c.codegen.cuda.composed import compose
from v41c.codegen.cuda.kernel import CudaKernel
from v41c.errors import UnsupportedError
from v41c.ir.fused import FusedOp
from v41c.manifest import KERNELS_FOLDER

if TYPE_CHECKING:
    from v41c.ir.op import Op
    from v41c.ir.types import TensorType
    from v41c.targets.cuda import CudaTarget


def has_kernel(name: str) -> bool:
    """Whether there is a kernel file for the operation of this name; a fused one can do without."""
    return find_spec(f"v41c.codegen.cuda.{name}") is not None


def kernel_for(
    op: Op,
    operands: Sequence[TensorType | None],
    results: Sequence[TensorType],
    target: CudaTarget,
    bounds: Mapping[str, int],
) -> CudaKernel:
    """The kernel of `op` at these types on `target`.

    `bounds` is the largest value of each symbolic dimension that this variant will meet. A fused operation without a
    kernel, or whose kernel is None at these bounds, is made of the kernels of its parts. UnsupportedError names
    operation, target and reason.
    """
    kernel = None
    if has_kernel(op.name()):
        module = importlib.import_module(f"v41c.codegen.cuda.{op.name()}")
        kernel = module.kernel(op, tuple(operands), tuple(results), target, bounds)
    elif not isinstance(op, FusedOp):
        raise UnsupportedError(f"{op.name()} on {target.name}: no kernel; expected codegen/cuda/{op.name()}.py")
    if kernel is None and isinstance(op, FusedOp):
        return compose(
            op, operands, results, bounds, lambda part, types, made: kernel_for(part, types, made, target, bounds)
        )
    if not isinstance(kernel, CudaKernel):
        raise UnsupportedError(f"{op.name()} on {target.name}: kernel(): expected a CudaKernel, got {type(kernel)}")
    return kernel


def build_kernels(
    kernels: Sequence[CudaKernel], target: CudaTarget, dims: Sequence[str], folder: Path, workshop: Workshop
) -> Built:
    """A cubin per Triton function, and the launches that every kernel is made of."""
    from v41c.codegen.cuda.build import build_cubins, functions_of
    from v41c.codegen.cuda.lower import cubin_entry, launch_entry

    cubins = folder / KERNELS_FOLDER
    cubins.mkdir()
    made = build_cubins(kernels, target, cubins, workshop.cache, workshop.progress)
    functions = functions_of(kernels)
    return Built(
        cubins={key: cubin_entry(functions[key], f"{KERNELS_FOLDER}/{key}.cubin", made[key]) for key in made},
        launches={
            kernel.symbol: [launch_entry(kernel, launch, dims) for launch in kernel.launches] for kernel in kernels
        },
    )
