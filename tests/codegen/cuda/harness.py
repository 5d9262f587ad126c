"""Operations on torch tensors through their CUDA kernels in Triton's interpreter, launched as an engine does."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.codegen.cuda.interpreter import install
from tests.codegen.harness import Array, aligned, poisoned
from tests.codegen.sparse_harness import Operands, as_array, as_tensor, symbolic_types
from v41c.codegen.cuda import kernel_for
from v41c.codegen.cuda.kernel import CudaKernel, Launch
from v41c.ir.op import Op
from v41c.ir.types import TensorType
from v41c.targets.cuda import CudaTarget

TORCH_TYPES = {
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "i32": torch.int32,
    "i64": torch.int64,
    "u8": torch.uint8,
}


@dataclass(frozen=True)
class Subject:
    """The kernel of an operation for operands like these, at most `tokens` of them."""

    op: Op
    types: tuple[TensorType | None, ...]
    kernel: CudaKernel

    @classmethod
    def of(cls, op: Op, operands: Operands, target: CudaTarget, tokens: int) -> Subject:
        """The kernel for `target`; every other size is bounded by what the operands have."""
        types, sizes = symbolic_types(op, operands)
        bounds = {name: max(size, 1) for name, size in sizes.items()} | {"T": tokens}
        return cls(op, types, kernel_for(op, types, op.infer_results(types), target, bounds))

    def call(self, operands: Operands) -> tuple[Tensor, ...]:
        """States, updated, then the other results. The operands stay as they are."""
        _, sizes = symbolic_types(self.op, operands)
        declared = zip(self.op.operands(), operands, strict=True)
        inputs = {name.name: as_array(operand) for name, operand in declared if operand is not None}
        kinds = [kind.bind(sizes) for kind in self.op.infer_results(self.types)]
        states = self.op.states
        outputs = [poisoned([int(dim) for dim in kind.shape], kind.dtype) for kind in kinds[len(states) :]]
        run(self.kernel, [*inputs.values(), *outputs], sizes)
        arrays = [*(inputs[name] for name in states), *outputs]
        return tuple(as_tensor(array, kind) for array, kind in zip(arrays, kinds, strict=True))


def run(kernel: CudaKernel, buffers: Sequence[Array], dims: Mapping[str, int]) -> None:
    """Run a kernel's launches; `buffers` are its operands and results, the workspace is made here, full of NaNs."""
    install()
    values: dict[str, Array | int] = dict(zip(kernel.arguments, buffers, strict=False))
    if kernel.workspace_bytes:
        values["workspace"] = poisoned([kernel.workspace_bytes], "u8")
    counters = aligned(poisoned([kernel.counter_bytes], "u8") * 0)
    if kernel.counter_bytes:
        values["counters"] = counters
    values |= {name: dims[name] for name in kernel.dims}
    if tuple(values) != kernel.arguments:
        raise ValueError(f"{kernel.symbol}: arguments: expected {kernel.arguments}, got {tuple(values)}")
    for launch in kernel.launches:
        _launch(launch, values, dims)
    if counters.any():
        raise ValueError(f"{kernel.symbol}: expected counters left at zero")


def _launch(launch: Launch, values: Mapping[str, Array | int], dims: Mapping[str, int]) -> None:
    grid = tuple(axis.blocks(dims) for axis in launch.grid)
    if 0 in grid:
        return
    arguments = {p.name: _argument(values[p.argument], p.type, p.offset) for p in launch.parameters}
    function = getattr(importlib.import_module(launch.function.module), launch.function.name)
    function[grid](**arguments, **launch.function.constants)


def _argument(value: Array | int, kind: str, offset: int) -> Tensor | int:
    if isinstance(value, int):
        return value
    dtype = TORCH_TYPES[kind.removeprefix("*")]
    flat = torch.from_numpy(value.reshape(-1).view("u1"))[offset:]
    return flat[: flat.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
