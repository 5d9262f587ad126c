"""Triton's interpreter, made to round as a GPU does.

As it comes, it truncates f32 to bf16, rounds f32 to e4m3 wrongly and without saturation, adds the bits of bf16 values,
multiplies bf16 matrices as integers, and spreads conditions over blocks as 32-bit integers, which no mask may be.
`install` replaces these by what the hardware computes: round to nearest even with saturation (PTX `cvt.rn.satfinite`),
bf16 arithmetic in f32 rounded once, products of matrices summed in f64 and rounded to f32, and conditions. Nested
calls of Triton functions are prepared once a launch instead of at every call.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_TYPES: dict[str, Any] = {
    "bf16": ml_dtypes.bfloat16,
    "fp8e4nv": ml_dtypes.float8_e4m3fn,
    "fp16": np.float16,
    "fp32": np.float32,
    "fp64": np.float64,
}
_LARGEST_E4M3 = 448.0
_COMPARISONS = [f"fcmp{order}{relation}" for order in "OU" for relation in ("LT", "GT", "LE", "GE", "EQ", "NE")]
_BINARY = ["fadd", "fmul", "fsub", "fdiv", "minnumf", "maxnumf", "minimumf", "maximumf", *_COMPARISONS]


@cache
def install() -> None:
    """Make the replacements, once a process."""
    convert = interpreter._convert_float

    def convert_float(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        before, after = _TYPES.get(source.name), _TYPES.get(target.name)
        if before is None or after is None:
            return convert(values, source, target, rounding)
        numbers = np.ascontiguousarray(values).view(before)
        if target.name == "fp8e4nv":
            wide = numbers.astype(np.float32)
            clipped = np.clip(wide, -_LARGEST_E4M3, _LARGEST_E4M3)
            numbers = np.where(np.isnan(wide), wide, clipped).astype(np.float32)
        if after not in (np.float32, np.float64):
            numbers = numbers.astype(np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            return numbers.astype(after).view(f"uint{target.primitive_bitwidth}")

    interpreter._convert_float = convert_float
    builder = interpreter.InterpreterBuilder
    for name in _BINARY:
        if hasattr(builder, f"create_{name}"):
            setattr(builder, f"create_{name}", _in_f32(getattr(builder, f"create_{name}")))
    builder.create_dot = _dot
    builder.create_splat = _splat
    _prepare_nested_calls_once()


def _in_f32(create: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(self: Any, left: Any, right: Any) -> Any:
        if left.dtype.scalar != tl.bfloat16:
            return create(self, left, right)
        result = create(self, _widened(left), _widened(right))
        if result.dtype.scalar != tl.float32:
            return result
        bits = result.data.astype(np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)
        return interpreter.TensorHandle(bits, tl.bfloat16)

    return wrapped


def _widened(handle: Any) -> Any:
    return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _dot(self: Any, left: Any, right: Any, start: Any, precision: Any, imprecise: Any) -> Any:
    total = np.matmul(_in_f64(left), _in_f64(right)) + start.data
    return interpreter.TensorHandle(total.astype(start.data.dtype), start.dtype.scalar)


def _splat(self: Any, kind: Any, scalar: Any) -> Any:
    value = np.asarray(scalar.data).reshape(-1)[0]
    return interpreter.TensorHandle(np.full(kind.shape, value), scalar.dtype.scalar)


def _in_f64(handle: Any) -> Any:
    kind = _TYPES.get(handle.dtype.scalar.name)
    data = np.ascontiguousarray(handle.data)
    return data if kind is None else data.view(kind).astype(np.float64)


def _prepare_nested_calls_once() -> None:
    prepared: set[int] = set()
    launch = interpreter.GridExecutor.__call__

    def launch_prepared(self: Any, *args: Any, **kwargs: Any) -> Any:
        prepared.clear()
        try:
            return launch(self, *args, **kwargs)
        finally:
            prepared.clear()

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if id(self) not in prepared:
            interpreter._patch_lang(self.fn)
            prepared.add(id(self))
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter.GridExecutor.__call__ = launch_prepared
    interpreter.InterpretedFunction.__call__ = call


def run_blocks_backwards(patch: Any) -> None:
    """Until `patch`, a MonkeyPatch, is undone: a launch's last block runs first."""
    builder = interpreter.InterpreterBuilder
    place = builder.set_grid_idx

    def place_backwards(self: Any, *indices: int) -> None:
        place(self, *(size - 1 - index for size, index in zip(self.grid_dim, indices, strict=True)))

    patch.setattr(builder, "set_grid_idx", place_backwards)
