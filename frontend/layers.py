"""The parameter holders of the eager model: linear layers, norms, and the context of one step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from v41c.frontend.apply import apply
from v41c.frontend.arithmetic import Arithmetic
from v41c.ir.ops.linear import Linear as LinearOp
from v41c.ir.ops.rms_norm import RmsNorm

Format = Literal["fp4", "fp8", "bf16", "f32"]
_DTYPES = {"fp4": torch.int8, "fp8": torch.float8_e4m3fn, "bf16": torch.bfloat16, "f32": torch.float32}


def parameter(dtype: torch.dtype, *shape: int) -> nn.Parameter:
    """An uninitialised parameter; checkpoints fill it."""
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


def stored(format: Format, *shape: int) -> tuple[nn.Parameter, nn.Parameter | None]:
    """Weight [..., M, K] and scale as a checkpoint stores them in a format."""
    *lead, rows, columns = shape
    blocks = -(-columns // 32)
    if format == "fp4":
        weight = parameter(torch.int8, *lead, rows, columns // 2)
        return weight, parameter(torch.float8_e8m0fnu, *lead, rows, blocks)
    weight = parameter(_DTYPES[format], *shape)
    return weight, parameter(torch.float8_e8m0fnu, *lead, -(-rows // 32), blocks) if format == "fp8" else None


class Linear(nn.Module):
    """y = W x. The input is used as it is; the caller quantises it when the weight is quantised."""

    def __init__(self, rows: int, columns: int, format: Format, out: str) -> None:
        super().__init__()
        self.op = LinearOp(out)
        self.weight, self.scale = stored(format, rows, columns)

    def forward(self, x: Tensor) -> Tensor:
        """[T, K] → [T, M]."""
        return apply(self.op, x, self.weight, self.scale)  # type: ignore[no-any-return]


class Norm(nn.Module):
    """RMS norm with a learned weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.op = RmsNorm(eps)
        self.weight = parameter(torch.bfloat16, width)

    def forward(self, x: Tensor) -> Tensor:
        """[T, D] → [T, D]."""
        return apply(self.op, x, self.weight)  # type: ignore[no-any-return]


class Table(nn.Module):
    """A weight that is looked up or multiplied, with an optional scale."""

    def __init__(self, rows: int, columns: int, format: Format) -> None:
        super().__init__()
        self.weight = parameter(_DTYPES[format], rows, columns)
        self.scale = parameter(torch.float8_e8m0fnu, rows, columns // 32) if format == "fp8" else None


@dataclass
class Step:
    """One step over flattened tokens: what every layer reads, the states it writes, and what it shares.

    tokens, positions, slots, first, starts: i32 [T]. A sequence's tokens are contiguous with consecutive positions;
    window keys below `first` are invisible. Global rows of positions below `kept` i32 [T] stay as they are; layers of
    the draft head have none and go without. image: bool [T], tokens of images' spans; what stands in their place say
    image_rows i32 [T] and image_values [I, D] (`PlaceImages`). `tables` maps a rope table's key to (cos, sin). `record`
    is called with a name and a tensor at every landmark of the model.
    """

    arithmetic: Arithmetic
    tokens: Tensor
    positions: Tensor
    slots: Tensor
    first: Tensor
    starts: Tensor
    states: dict[str, Tensor]
    record: Callable[[str, Tensor], None]
    kept: Tensor | None = None
    image: Tensor | None = None
    image_rows: Tensor | None = None
    image_values: Tensor | None = None
    compressed_ids: Tensor | None = None
    tables: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)
    selections: dict[int, Tensor] = field(default_factory=dict)
    pool: Tensor | None = None
