"""Making stored weights: e4m3 with a power-of-two scale per 32 x 32 block or per 32 of a row, e2m1 with one per 32."""

from __future__ import annotations

import torch

from v41c.ir.formats import FORMATS, pack, scales

GROUP = 32
"""Elements along the reduction axis, and rows of a block-scaled weight, that share one scale."""


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
