"""What a CUDA kernel file hands to the builder: launches of Triton functions, with everything but addresses settled."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

Constant = int | float | bool | str | None


@dataclass(frozen=True)
class Parameter:
    """A runtime parameter of a launch: one of the kernel's buffers, moved by `offset` bytes, or a dimension.

    `argument` is one of `CudaKernel.arguments`. `type` is Triton's: `*bf16`, `*u8`, `i32`, …
    """

    name: str
    argument: str
    type: str
    offset: int = 0


@dataclass(frozen=True)
class Axis:
    """Blocks along one axis of a grid: count · ceil(dim / tile); `count` alone without a symbolic dimension."""

    count: int = 1
    dim: str | None = None
    tile: int = 1

    def blocks(self, dims: Mapping[str, int]) -> int:
        """How many they are at given dimensions."""
        return self.count * (1 if self.dim is None else -(-dims[self.dim] // self.tile))


@dataclass(frozen=True)
class Function:
    """A Triton function with its types and constants: what becomes one cubin per architecture."""

    module: str
    name: str
    parameters: tuple[tuple[str, str], ...]
    constants: Mapping[str, Constant]
    warps: int
    stages: int

    def key(self) -> str:
        """A C identifier that is equal exactly for equal functions: `linear_rows_4f2a…`."""
        text = json.dumps(asdict(self), sort_keys=True)
        return f"{self.name.lstrip('_')}_{hashlib.sha256(text.encode()).hexdigest()[:12]}"


@dataclass(frozen=True)
class Launch:
    """One launch: the function, its runtime parameters in order, and its grid."""

    function: Function
    parameters: tuple[Parameter, ...]
    grid: tuple[Axis, Axis, Axis]


@dataclass(frozen=True)
class CudaKernel:
    """What one operation becomes: launches in order, and what their caller must provide.

    `arguments` names what the caller passes, in order: every present operand (a state once, updated in place), the
    results that are not states as `result 0`, …, `workspace` if `workspace_bytes` > 0, `counters` if `counter_bytes`
    > 0, then the symbolic dimensions `dims`. Counters are zero before and after every kernel.
    """

    symbol: str
    arguments: tuple[str, ...]
    launches: tuple[Launch, ...]
    dims: tuple[str, ...] = ()
    workspace_bytes: int = 0
    counter_bytes: int = 0
    #: weight layout by operand index
    layouts: Mapping[int, str] = field(default_factory=dict)


#: Triton's spelling of element types; packed formats and scales are bytes, which kernels take apart themselves
TRITON_TYPES: Mapping[str, str] = {
    "f32": "fp32",
    "bf16": "bf16",
    "f8e4m3": "u8",
    "f4e2m1": "u8",
    "e8m0": "u8",
    "i32": "i32",
    "i64": "i64",
    "bool": "u8",
    "u8": "u8",
}
