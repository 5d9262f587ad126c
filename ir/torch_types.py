"""IR types of torch tensors. Packed fp4 weights are int8 bytes in torch and count elements in the IR."""

from __future__ import annotations

from typing import TYPE_CHECKING

from v41c.ir.types import DType, TensorType

if TYPE_CHECKING:
    import torch

_NAMES = {
    "float32": DType.F32,
    "bfloat16": DType.BF16,
    "float8_e4m3fn": DType.F8E4M3,
    "int8": DType.F4E2M1,
    "float8_e8m0fnu": DType.E8M0,
    "int32": DType.I32,
    "int64": DType.I64,
    "bool": DType.BOOL,
    "uint8": DType.U8,
}
_TORCH = {dtype: name for name, dtype in _NAMES.items()}


def type_of(tensor: torch.Tensor) -> TensorType:
    """IR type of a tensor; its symbolic sizes stay as they are."""
    dtype = _NAMES[str(tensor.dtype).removeprefix("torch.")]
    shape = tuple(tensor.shape)
    return TensorType(dtype, (*shape[:-1], shape[-1] * 2) if dtype == DType.F4E2M1 else shape)


def torch_dtype(dtype: DType) -> torch.dtype:
    """The torch dtype that stores an IR element type."""
    import torch

    return getattr(torch, _TORCH[dtype])  # type: ignore[no-any-return]
