"""Making stored weights: e4m3 with a power-of-two scale per 32 x 32 block or per 32 of a row, e2m1 with one per 32."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from v41c.ir.formats import FORMATS, pack, scales

GROUP = 32
"""Elements along the reduction axis, and rows of a block-scaled weight, that share one scale."""


@dataclass(frozen=True)
class Storage:
    """How a quantised weight is stored: format of `ir.formats` of its elements, and rows that share a scale."""

    format: str
    rows: int


def storage_of(name: str, dtype: str) -> Storage:
    """Storage of a quantised tensor of a checkpoint, by its name and safetensors dtype ("I8" or "F8_E4M3")."""
    if dtype == "I8":
        return Storage("fp4_e8m0_32", 1)
    return Storage("fp8_e8m0_32", 1 if name.endswith(".engram.embed.weight") else GROUP)


def quantize(weight: torch.Tensor, storage: Storage) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 [N, K] in a storage: elements and scales."""
    return quantize_blocks(weight) if storage.rows == GROUP else quantize_rows(weight, storage.format)


def quantize_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 [N, K] -> e4m3 [N, K] and e8m0 [ceil(N/32), ceil(K/32)]."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % GROUP, 0, -rows % GROUP))
    grid = (padded.shape[0] // GROUP, padded.shape[1] // GROUP)
    blocks = padded.reshape(grid[0], GROUP, grid[1], GROUP).transpose(1, 2)  # [N/32, K/32, 32, 32]
    scale = scales(blocks.flatten(2), FORMATS["fp8_e8m0_32"])  # [N/32, K/32, 1]
    scaled = (blocks / scale[..., None]).transpose(1, 2).reshape(padded.shape)[:rows, :columns]
    return scaled.clamp(-448.0, 448.0).to(torch.float8_e4m3fn), scale[..., 0].to(torch.float8_e8m0fnu)


def quantize_rows(weight: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 [N, K], K a multiple of 32, in the row format `name` of `ir.formats` with power-of-two scales.

    "fp8_e8m0_32" gives e4m3 [N, K], "fp4_e8m0_32" int8 pairs [N, K/2]; both with e8m0 [N, K/32].
    """
    packed = pack(weight, name)
    width = packed.shape[1] - weight.shape[1] // GROUP
    stored = torch.float8_e4m3fn if FORMATS[name].element_bits == 8 else torch.int8
    elements, scale = packed[:, :width], packed[:, width:]
    return elements.contiguous().view(stored), scale.contiguous().view(torch.float8_e8m0fnu)
