"""What a pass may know besides the graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from v41c.ir.op import Op
from v41c.ir.types import TensorType


class Kernel(Protocol):
    """What selection needs of a kernel; code generation has the rest."""

    @property
    def symbol(self) -> str:
        """Unique name of the kernel for these types, attributes and bounds."""

    @property
    def workspace_bytes(self) -> int:
        """Scratch memory of one launch."""


class Machine(Protocol):
    """What passes weigh one form of a program against another by, and what it can do; targets have it."""

    @property
    def name(self) -> str:
        """What messages call it."""

    @property
    def kept_bytes(self) -> int:
        """Weights of no more than this stay in memory once they are read; larger ones may lie on disk."""

    @property
    def memory_bytes_per_second(self) -> float:
        """Reading or writing of what no cache holds, by one processor core."""

    @property
    def dequantised_per_second(self) -> float:
        """Elements of packed rows that one core makes f32 of."""

    @property
    def launch_seconds(self) -> float:
        """What one more operation costs, however little it does."""

    @property
    def runs_aside(self) -> bool:
        """Whether a kernel may run beside those that follow it."""

    @property
    def shares_index_scores(self) -> bool:
        """Whether one kernel makes both selections of an indexer from scores that are made once."""

    @property
    def packs_activations(self) -> bool:
        """Whether boundaries write, and products read, packed rows of activations."""

    @property
    def has_block_scaled_mma(self) -> bool:
        """Whether matrix products apply a power-of-two scale to every 32 elements themselves."""


KernelFor = Callable[
    [Op, tuple[TensorType | None, ...], tuple[TensorType, ...], Mapping[str, int]],
    Kernel,
]


@dataclass(frozen=True)
class Numbers:
    """What a pass may do to the numbers: nothing, unless its file says otherwise in `NUMBERS`, and why.

    `relative_l2` is the most by which any value may move; None where the pass computes something else on purpose.
    """

    why: str
    relative_l2: float | None = None


EXACT = Numbers("the same operations on the same numbers in the same order", 0.0)


@dataclass(frozen=True)
class PassContext:
    """Options of a compilation.

    `kernel_for` gives the target's kernel for an operation at types and upper bounds of the symbolic dimensions.
    `variants` are the token counts that programs are compiled for, ascending; `bounds` bound every other dimension.
    `images` bounds the patches T and the rows R of a step of the graph `vision`, which takes whole images.
    `quantized` has the types, by name, of weights in the release's quantised formats and of their scales. Without a
    `machine` nothing is chosen by cost.
    """

    arithmetic: Literal["release", "exact"]
    kernel_for: KernelFor
    variants: tuple[int, ...]
    bounds: Mapping[str, int] = field(default_factory=dict)
    quantized: Mapping[str, TensorType] = field(default_factory=dict)
    machine: Machine | None = None
    images: Mapping[str, int] = field(default_factory=dict)
