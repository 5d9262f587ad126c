"""One compiled function of an engine: what the kernel writers hand to the builder and the memory plan."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from v41c.ir.op import Op
    from v41c.ir.types import TensorType


class Kernel(Protocol):
    """What the memory plan and the engine's programs need of a kernel, whatever it is written in.

    Its arguments, in order: every present operand (a state once, updated in place), the results that are not states,
    the workspace and the counters if it has any, then the symbolic dimensions `dims`.
    """

    @property
    def symbol(self) -> str:
        """Unique name for these types, attributes and bounds: `kernel_symbol`."""

    @property
    def dims(self) -> tuple[str, ...]:
        """Symbolic dimensions passed as integers."""

    @property
    def workspace_bytes(self) -> int:
        """Scratch memory at the bounds the kernel was made for."""

    @property
    def counter_bytes(self) -> int:
        """Memory that is zero before and after the kernel."""

    @property
    def layouts(self) -> Mapping[int, str]:
        """Weight layout by operand index, where it is not the checkpoint's."""


@dataclass(frozen=True)
class CpuKernel:
    """A TIR function over raw pointers, dimensions as 64-bit integers; see `Kernel`."""

    symbol: str
    #: writes the `tvm.tirx.PrimFunc`, which only the building of an object file needs
    function: Callable[[], Any]
    #: symbolic dimensions passed as scalars, in order
    dims: tuple[str, ...] = ()
    #: scratch memory at the bounds the kernel was made for
    workspace_bytes: int = 0
    #: weight layout by operand index; `codegen.cpu.layouts.pack` makes them
    layouts: Mapping[int, str] = field(default_factory=dict)

    @property
    def counter_bytes(self) -> int:
        """None are needed: threads wait for each other."""
        return 0


def kernel_symbol(
    op: Op,
    operands: Sequence[TensorType | None],
    results: Sequence[TensorType],
    bounds: Mapping[str, int],
) -> str:
    """A C identifier that is equal exactly for equal operations, types and bounds: `rms_norm_T1_4f2a…`.

    Only bounds of dimensions that occur in the types count, so that one kernel serves every use that it fits.
    """
    types = [*operands, *results]
    names = sorted({name for kind in types if kind is not None for name in kind.symbols})
    used = {name: bounds[name] for name in names if name in bounds}
    key = json.dumps([op.name(), op.text(), [str(kind) for kind in types], used])
    tokens = f"_T{used['T']}" if "T" in used else ""
    return f"{op.name()}{tokens}_{hashlib.sha256(key.encode()).hexdigest()[:12]}"
