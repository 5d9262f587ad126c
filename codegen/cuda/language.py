"""Triton's decorator with a type, so that kernels keep theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import triton

_Function = TypeVar("_Function", bound=Callable[..., object])


def jit(function: _Function) -> _Function:
    """`triton.jit`: a kernel, or a function that kernels call."""
    return cast(_Function, triton.jit(function))


def constant_function(function: _Function) -> _Function:
    """`triton.constexpr_function`: a function of constants that runs while a kernel is compiled."""
    return cast(_Function, triton.constexpr_function(function))
