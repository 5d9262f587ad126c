"""Random operands of the types and in the ranges that a running model has, for measurements."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch

from tools.gpu_plan import CONTEXT, Case, capped
from v41c.ir import formats, packed
from v41c.ir.torch_types import torch_dtype
from v41c.ir.types import DType, TensorType

if TYPE_CHECKING:
    from torch import Tensor

#: formats of packed rows by operand; those of an operation that writes a cache are its attribute
_ROWS = {"window": "fp8_e8m0_32", "keys": "fp4_e8m0_32", "compressed": "fp4_e4m3_16"}
#: f32 operands that are shares of something
_SHARES = ("pre", "post", "comb", "weights")
#: ids of tokens where no table bounds them
_VOCABULARY = 100_000


def operands_of(case: Case, device: str, seed: int = 0) -> tuple[Tensor | None, ...]:
    """One run of one sequence that ends at the context's end; weights that keep activations near unit size."""
    maker = _Maker(case, torch.Generator(device).manual_seed(seed), device)
    declared = zip(case.op.operands(), case.types, strict=True)
    return tuple(None if kind is None else maker.make(name.name, capped(kind)) for name, kind in declared)


@cache
def _packed(format: str, shape: tuple[int, ...]) -> Tensor:
    """Packed rows of normal values on the CPU, which the packing was written for."""
    group = formats.FORMATS[format].group
    width = shape[-1] // formats.FORMATS[format].row_bytes(group) * group
    values = torch.randn([*shape[:-1], width], generator=torch.Generator().manual_seed(1))
    return formats.pack(values, format)


class _Maker:
    def __init__(self, case: Case, generator: torch.Generator, device: str) -> None:
        self._case = case
        self._generator = generator
        self._device = device

    def make(self, name: str, kind: TensorType) -> Tensor:
        """An operand of a type whose sizes are numbers."""
        shape = [int(size) for size in kind.shape]
        match kind.dtype:
            case DType.F32 | DType.BF16:
                return self._floats(name, shape).to(torch_dtype(kind.dtype))
            case DType.F8E4M3:  # any but the two that are NaN
                magnitude, sign = self._integers(0, 0x7F, shape), self._integers(0, 2, shape)
                return (magnitude | sign << 7).view(torch.float8_e4m3fn)
            case DType.F4E2M1:
                return self._integers(0, 256, [*shape[:-1], shape[-1] // 2]).view(torch.int8)
            case DType.E8M0:
                return self._integers(116, 119, shape).view(torch.float8_e8m0fnu)
            case DType.BOOL:
                return torch.zeros(shape, dtype=torch.bool, device=self._device)
            case DType.U8:
                return self._rows(name, shape)
            case _:
                return self._places(name, shape).to(torch_dtype(kind.dtype))

    def _integers(self, low: int, high: int, shape: list[int], dtype: torch.dtype = torch.uint8) -> Tensor:
        return torch.randint(low, high, shape, generator=self._generator, device=self._device, dtype=dtype)

    def _floats(self, name: str, shape: list[int]) -> Tensor:
        if name in _SHARES:
            return torch.rand(shape, generator=self._generator, device=self._device)
        values = torch.randn(shape, generator=self._generator, device=self._device)
        is_matrix = len(shape) > 1 and shape[0] != self._case.tokens and name != "table"
        return values / shape[-1] ** 0.5 if is_matrix else values

    def _rows(self, name: str, shape: list[int]) -> Tensor:
        op = self._case.op
        format = packed.FORMAT if name in op.packable else _ROWS.get(name) or str(op.attributes()["format"])
        return _packed(format, tuple(shape)).to(self._device, copy=True)

    def _places(self, name: str, shape: list[int]) -> Tensor:
        """Whatever says where something is: integers within what they point into."""
        case, device = self._case, self._device
        match name:
            case "positions":
                return torch.arange(CONTEXT - shape[0], CONTEXT, device=device)
            case "slots" | "starts" | "first" | "kept" | "begins":
                return torch.zeros(shape, device=device)
            case "ends":
                return torch.full(shape, shape[0], device=device)
            case "sources":
                return self._integers(-1, self._size("x", 0), shape, torch.int64)
            case "image_rows":
                return self._integers(-4, self._size("image_values", 0), shape, torch.int64)
            case "ids" if len(shape) == 2:
                return self._distinct(shape, self._size("w1", 0))
            case "selection":
                return self._distinct(shape, self._size("compressed", 1)).sort().values
            case "pool":
                return self._distinct(shape, self._size("keys", 1) // int(case.op.attributes()["block"])).sort().values
            case "places":
                count = shape[0] * shape[1]
                return torch.randperm(count, generator=self._generator, device=device).reshape(shape)
            case "table":
                return torch.arange(shape[0], device=device)
            case "rows" if len(shape) == 1:
                return torch.arange(shape[0], device=device)
            case "rows":
                rows = self._integers(0, self._size("table", 0) or _VOCABULARY, shape, torch.int64)
                return rows.flatten().sort().values.reshape(shape) if case.op.name().endswith("ordered") else rows
            case _:
                return self._integers(0, self._size("table", 0) or _VOCABULARY, shape, torch.int64)

    def _distinct(self, shape: list[int], among: int) -> Tensor:
        """Rows of different integers."""
        order = torch.rand([shape[0], among], generator=self._generator, device=self._device)
        return order.topk(shape[1], dim=1).indices

    def _size(self, name: str, axis: int) -> int:
        """A size of another operand as it is made, 0 where there is none."""
        for declared, kind in zip(self._case.op.operands(), self._case.types, strict=True):
            if declared.name == name and kind is not None:
                return int(capped(kind).shape[axis])
        return 0
