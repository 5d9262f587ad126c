"""Number formats of activations, caches and weights, in PyTorch: rounding, packing, unpacking.

| name          | element | group | scale                                           | used for               |
|---------------|---------|-------|-------------------------------------------------|------------------------|
| `fp8_e8m0_32` | e4m3    | 32    | 2^ceil(log2(max(amax, 1e-4) / 448))             | activations, window KV |
| `fp4_e8m0_32` | e2m1    | 32    | 2^ceil(log2(max(amax, 6·2^-126) / 6))           | index queries and keys |
| `fp4_e4m3_16` | e2m1    | 16    | e4m3(max(amax, 6·2^-9) / 6), saturating at 448  | compressed KV          |

Elements are divided by the scale, clamped to ±448 or ±6 and rounded to nearest even. Power-of-two scales are computed
on the bits of the fp32 maximum; a float logarithm is wrong at exact powers of two. Packed rows are bytes: the elements
(two e2m1 per byte, even index in the low nibble), then the scales.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Format:
    """A group-scaled format: element bits, group length, largest magnitude, smallest group maximum."""

    element_bits: int
    group: int
    largest: float
    floor: float
    power_of_two: bool

    def row_bytes(self, width: int) -> int:
        """Bytes of a packed row of `width` elements."""
        return width * self.element_bits // 8 + width // self.group


FORMATS = {
    "fp8_e8m0_32": Format(8, 32, 448.0, 1e-4, True),
    "fp4_e8m0_32": Format(4, 32, 6.0, 6.0 * 2.0**-126, True),
    "fp4_e4m3_16": Format(4, 16, 6.0, 6.0 * 2.0**-9, False),
}
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def scales(groups: Tensor, format: Format) -> Tensor:
    """Scales f32 [..., 1] of groups f32 [..., group]."""
    import torch

    amax = groups.abs().amax(-1, keepdim=True).clamp_min(format.floor)
    if not format.power_of_two:
        return (amax / format.largest).clamp_max(448.0).to(torch.float8_e4m3fn).float()
    # largest = m · 2^e, 1 ≤ m < 2: amax / largest rounds up to the next power of two iff amax's mantissa exceeds m
    bits = amax.view(torch.int32)
    limit = torch.tensor(format.largest).view(torch.int32).item()
    exponent = (bits >> 23) - (int(limit) >> 23) + ((bits & 0x7FFFFF) > (int(limit) & 0x7FFFFF)).int()
    return decode_e8m0((exponent + 127).to(torch.uint8))


def decode_e8m0(codes: Tensor) -> Tensor:
    """f32 values 2^(code − 127) of e8m0 codes (u8 or float8_e8m0fnu)."""
    import torch

    exponent = codes.view(torch.uint8).to(torch.int32)
    return torch.where(exponent == 0, 0x00400000, exponent << 23).view(torch.float32)


def encode_e2m1(values: Tensor) -> Tensor:
    """u8 codes 0…15 of f32 values, clamped to ±6 and rounded to nearest even."""
    import torch

    magnitude = values.abs().clamp_max(6.0)
    # half-way points go to the even code: 0.25→0, 0.75→1.0, 1.25→1.0, 1.75→2, 2.5→2, 3.5→4, 5→4
    code = (magnitude > 0.25).to(torch.uint8)
    for index, point in enumerate((0.75, 1.25, 1.75, 2.5, 3.5, 5.0)):
        code += (magnitude >= point) if index % 2 == 0 else (magnitude > point)
    return code | (values.signbit().to(torch.uint8) << 3)


def decode_e2m1(codes: Tensor) -> Tensor:
    """f32 values of u8 codes 0…15."""
    import torch

    table = torch.tensor([*E2M1, *(-value for value in E2M1)], device=codes.device)
    return table[codes.long()]


def unpack_nibbles(packed: Tensor) -> Tensor:
    """u8 codes [..., 2·B] of bytes [..., B]; the even index is the low nibble."""
    import torch

    packed = packed.view(torch.uint8)
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def pack_nibbles(codes: Tensor) -> Tensor:
    """Bytes [..., B] of u8 codes [..., 2·B]."""
    low, high = codes[..., 0::2], codes[..., 1::2]
    return low | (high << 4)


def round_elements(values: Tensor, format: Format) -> Tensor:
    """f32 values rounded to the element type, already divided by the scale."""
    import torch

    if format.element_bits == 8:
        return values.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).float()
    return decode_e2m1(encode_e2m1(values))


def round_trip(x: Tensor, name: str) -> Tensor:
    """`x` [..., K] quantised to a format and back, in the dtype of `x`; exact in bf16."""
    format = FORMATS[name]
    groups = x.float().unflatten(-1, (-1, format.group))
    scale = scales(groups, format)
    return (round_elements(groups / scale, format) * scale).flatten(-2).to(x.dtype)


def pack(x: Tensor, name: str) -> Tensor:
    """Packed rows u8 [..., row_bytes] of `x` [..., K]."""
    import torch

    format = FORMATS[name]
    groups = x.float().unflatten(-1, (-1, format.group))
    scale = scales(groups, format)
    values = (groups / scale).flatten(-2)
    if format.element_bits == 8:
        elements = values.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        elements = pack_nibbles(encode_e2m1(values))
    scale = scale.squeeze(-1)
    if format.power_of_two:
        # a scale of 2^-127 is the subnormal 0x00400000, whose exponent field is the code 0 it must have
        codes = (scale.view(torch.int32) >> 23).to(torch.uint8)
    else:
        codes = scale.to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.cat((elements, codes), -1)


def unpack(rows: Tensor, name: str, width: int) -> Tensor:
    """f32 values [..., width] of packed rows u8 [..., row_bytes]."""
    import torch

    format = FORMATS[name]
    elements, codes = rows.split((width * format.element_bits // 8, width // format.group), -1)
    if format.element_bits == 8:
        values = elements.contiguous().view(torch.float8_e4m3fn).float()
    else:
        values = decode_e2m1(unpack_nibbles(elements))
    codes = codes.contiguous()
    scale = decode_e8m0(codes) if format.power_of_two else codes.view(torch.float8_e4m3fn).float()
    groups: Tensor = values.unflatten(-1, (-1, format.group))
    return (groups * scale.unsqueeze(-1)).flatten(-2)


def read_rows(cache: Tensor, name: str, width: int) -> Tensor:
    """f32 values [..., width] of cache rows: packed if u8, plain if f32."""
    import torch

    return unpack(cache, name, width) if cache.dtype == torch.uint8 else cache


def write_rows(x: Tensor, name: str, cache: Tensor) -> Tensor:
    """`x` [..., width] as the cache stores it: packed if the cache is u8, plain if f32."""
    import torch

    return pack(x, name) if cache.dtype == torch.uint8 else x.float()


def dequantize(weight: Tensor, scale: Tensor | None) -> Tensor:
    """f32 weight [..., M, K] of a stored weight.

    fp8 e4m3 [..., M, K] with e8m0 [..., ceil(M/32), ceil(K/32)]; fp4 bytes int8 or u8 [..., M, K/2] with e8m0
    [..., M, K/32]; bf16 and f32 without a scale.
    """
    import torch

    if weight.dtype in (torch.int8, torch.uint8):
        if scale is None:
            raise ValueError("fp4 weight: expected a scale, got none")
        groups: Tensor = decode_e2m1(unpack_nibbles(weight)).unflatten(-1, (-1, 32))
        return (groups * decode_e8m0(scale).unsqueeze(-1)).flatten(-2)
    if scale is None:
        return weight.float()
    rows, columns = weight.shape[-2:]
    grid = decode_e8m0(scale).repeat_interleave(32, -2)[..., :rows, :].repeat_interleave(32, -1)[..., :columns]
    return weight.float() * grid
