"""Stored weight formats: e4m3 with a power-of-two scale per 32 x 32 block or per 32 of a row, e2m1 with one per 32."""

from __future__ import annotations

import torch

GROUP = 32
"""Elements along the reduction axis (and rows, in a block-scaled weight) that share one scale."""

_E4M3_MAX = 448.0
_E2M1_MAX = 6.0
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def quantize_fp8(weight: torch.Tensor, *, per_row: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 [N, K] -> e4m3 [N, K] and e8m0 [ceil(N/32), ceil(K/32)], or [N, ceil(K/32)] when `per_row`."""
    rows, columns = weight.shape
    height = 1 if per_row else GROUP
    padded = torch.nn.functional.pad(weight, (0, -columns % GROUP, 0, -rows % height))
    # [rows of blocks, height, columns of blocks, 32]
    blocks = padded.reshape(padded.shape[0] // height, height, padded.shape[1] // GROUP, GROUP)
    exponents = _scale_exponents(blocks.abs().amax(dim=(1, 3)), _E4M3_MAX)
    scaled = (blocks * _power_of_two(-exponents)[:, None, :, None]).flatten(2).flatten(0, 1)[:rows, :columns]
    return scaled.clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn), _e8m0(exponents)


def quantize_fp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 [N, K], K a multiple of 32 -> e2m1 pairs int8 [N, K/2] (even index low) and e8m0 [N, K/32]."""
    groups = weight.reshape(weight.shape[0], -1, GROUP)
    exponents = _scale_exponents(groups.abs().amax(dim=2), _E2M1_MAX)
    scaled = (groups * _power_of_two(-exponents)[:, :, None]).flatten(1)
    size = scaled.abs()
    # Nearest value, ties to the even code: a midpoint itself goes up only where the code above it is even.
    code = torch.zeros_like(size, dtype=torch.uint8)
    for midpoint in (0.25, 1.25, 2.5, 5.0):
        code += size > midpoint
    for midpoint in (0.75, 1.75, 3.5):
        code += size >= midpoint
    code |= scaled.signbit().to(torch.uint8) << 3
    return (code[:, 0::2] | (code[:, 1::2] << 4)).view(torch.int8), _e8m0(exponents)


def dequantize(weight: torch.Tensor, scale: torch.Tensor, *, per_row: bool = False) -> torch.Tensor:
    """A quantised weight [..., N, K] as fp32: every element times its power-of-two scale, exact.

    int8 weights are e2m1 pairs [..., N, K/2] with scales [..., N, K/32]; e4m3 weights have scales
    [..., ceil(N/32), ceil(K/32)], or [..., N, ceil(K/32)] when `per_row`.
    """
    factors = scale.float()
    if weight.dtype == torch.int8:
        codes = weight.view(torch.uint8)
        pairs = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)
        values = torch.tensor(_E2M1)[pairs.long()]
    else:
        values = weight.float()
        if not per_row:
            factors = factors.repeat_interleave(GROUP, dim=-2)[..., : values.shape[-2], :]
    return values * factors.repeat_interleave(GROUP, dim=-1)[..., : values.shape[-1]]


def _scale_exponents(largest: torch.Tensor, limit: float) -> torch.Tensor:
    """ceil(log2(largest / limit)) on the bits, within what e8m0 and its inverse hold; the smallest for zeros."""
    mantissa, exponent = torch.frexp(largest / limit)
    exponents = torch.where(mantissa == 0.5, exponent - 1, exponent)
    return torch.where(largest > 0, exponents, -126).clamp(-126, 126)


def _power_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """fp32 powers of two from their bits; exact for exponents within -126..126."""
    return ((exponents + 127).to(torch.int32) << 23).view(torch.float32)


def _e8m0(exponents: torch.Tensor) -> torch.Tensor:
    return (exponents + 127).to(torch.uint8).view(torch.float8_e8m0fnu)
