"""Calling CPU kernels from tests: build once, pass numpy arrays, poison whatever a kernel must write."""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from v41c.codegen.kernel import CpuKernel
from v41c.targets.target import CpuTarget

Array = NDArray[Any]


class _Value(ctypes.Union):
    _fields_ = (("integer", ctypes.c_int64), ("pointer", ctypes.c_void_p))


class _Argument(ctypes.Structure):
    _fields_ = (("type_index", ctypes.c_int32), ("padding", ctypes.c_uint32), ("value", _Value))


class _Command(ctypes.Structure):
    _fields_ = (("kernel", ctypes.c_void_p), ("arguments", ctypes.c_void_p), ("count", ctypes.c_int64))


def _argument(value: Array | int) -> _Argument:
    if isinstance(value, int):
        return _Argument(1, 0, _Value(integer=value))
    if not value.flags.c_contiguous:
        raise ValueError(f"kernel argument: expected a contiguous array, got strides {value.strides}")
    return _Argument(4, 0, _Value(pointer=value.ctypes.data))


class Library:
    """A built kernel library. `call` takes a kernel's buffers in order, then its dimensions by name."""

    def __init__(self, kernels: Sequence[CpuKernel], target: CpuTarget) -> None:
        from v41c.codegen.cpu.build import build_library  # the compiler: what tests of GPU kernels do without

        # a loaded library does not need its file
        with tempfile.TemporaryDirectory(prefix="v41c-test-") as folder:
            path = Path(folder, "kernels.so")
            build_library(kernels, target, path)
            self.handle = ctypes.CDLL(str(path))
        self.handle.v41c_run.restype = ctypes.c_int64
        self.handle.v41c_last_error.restype = ctypes.c_char_p

    def call(self, kernel: CpuKernel, buffers: Sequence[Array], dims: Mapping[str, int]) -> None:
        """Run a kernel; `buffers` are its operands and results, the workspace is made here, full of NaN bytes."""
        self.command(kernel, buffers, dims)()

    def command(self, kernel: CpuKernel, buffers: Sequence[Array], dims: Mapping[str, int]) -> Any:
        """The call as a function without arguments, for timing."""
        values: list[Array | int] = list(buffers)
        if kernel.workspace_bytes:
            values.append(aligned(np.full(kernel.workspace_bytes, 0xFF, np.uint8)))
        values += [dims[name] for name in kernel.dims]
        arguments = (_Argument * len(values))(*map(_argument, values))
        function = ctypes.cast(getattr(self.handle, f"__tvm_ffi_{kernel.symbol}"), ctypes.c_void_p).value
        command = _Command(function, ctypes.addressof(arguments), len(values))

        def run() -> None:
            if self.handle.v41c_run(ctypes.byref(command), ctypes.c_int64(1)):
                raise RuntimeError(f"{kernel.symbol}: {self.handle.v41c_last_error().decode()}")

        run.keep = (values, arguments, command)  # type: ignore[attr-defined]
        return run


def aligned(array: Array) -> Array:
    """A copy at an address that is a multiple of 64, as engines place buffers."""
    room = np.empty(array.nbytes + 64, np.uint8)
    start = -room.ctypes.data % 64
    result = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    result[...] = array
    return result


def poisoned(shape: Sequence[int], dtype: str) -> Array:
    """An output buffer by IR dtype, every byte 0xFF: NaN in f32, bf16, e4m3 and e8m0, −1 in integers."""
    bits = {"f32": np.float32, "bf16": np.uint16, "i32": np.int32, "i64": np.int64}
    kind = np.dtype(bits.get(dtype, np.uint8))
    count = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
    return aligned(np.full(count, 0xFF, np.uint8)).view(kind).reshape(tuple(shape))


def to_bf16(values: Array) -> Array:
    """bf16 bits (uint16) of f32 values, rounded to nearest even."""
    import ml_dtypes

    return values.astype(np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)


def from_bf16(bits: Array) -> Array:
    """f32 values of bf16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
