"""The vision tower: patches of images to rows that stand in the place of token embeddings (DeepSeek-V4.1 report,
section 2.6).

A pre-norm transformer over the patches of an image, each of which sees all others of it (arXiv:2010.11929), with rotary
angles of rows in the first half of a head's pairs and of columns in the second (arXiv:2403.13298); then blocks of
neighbouring patches side by side, and two linears with an exact GELU between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from v41c.frontend.apply import apply
from v41c.frontend.arithmetic import Arithmetic
from v41c.frontend.config import ModelConfig
from v41c.frontend.layers import Linear, Norm, parameter
from v41c.ir.ops.add import Add
from v41c.ir.ops.add_bias import AddBias
from v41c.ir.ops.concat import Concat
from v41c.ir.ops.gelu import Gelu
from v41c.ir.ops.image_attention import ImageAttention
from v41c.ir.ops.linear import Linear as LinearOp
from v41c.ir.ops.merge_patches import MergePatches
from v41c.ir.ops.reshape import Reshape
from v41c.ir.ops.rope_halves import RopeHalves
from v41c.ir.ops.rope_table import RopeTable
from v41c.ir.ops.swiglu_halves import SwigluHalves

NORM_EPS = 1e-6


@dataclass(frozen=True)
class Patches:
    """Patches of one or several images, flattened: values [T, 3·side·side] in [−1, 1], and i32 [T] of each.

    rows, columns: where a patch stands in its image. begins, ends: where the patches of its image begin and end.
    sources: i32 [R, merged²], the patches of every row of the result, −1 beyond the image.
    """

    values: Tensor
    rows: Tensor
    columns: Tensor
    begins: Tensor
    ends: Tensor
    sources: Tensor


class Biased(nn.Module):
    """y = W x + b, the sum in f32."""

    def __init__(self, rows: int, columns: int, out: str) -> None:
        super().__init__()
        self.weight, self.bias = parameter(torch.bfloat16, rows, columns), parameter(torch.bfloat16, rows)
        self.out = out

    def forward(self, x: Tensor) -> Tensor:
        """[T, K] → [T, M]."""
        return apply(AddBias(self.out), apply(LinearOp("f32"), x, self.weight, None), self.bias)  # type: ignore[no-any-return]


class PatchEmbed(nn.Module):
    """Patches to vectors."""

    def __init__(self, config: ModelConfig, arithmetic: Arithmetic) -> None:
        super().__init__()
        self.proj = Biased(config.vision_dim, 3 * config.vision_patch_size**2, arithmetic.activation)


class ImageAttentionLayer(nn.Module):
    """Attention within an image."""

    def __init__(self, config: ModelConfig, arithmetic: Arithmetic) -> None:
        super().__init__()
        c, out = config, arithmetic.activation
        self.heads, self.width = c.vision_n_heads, c.vision_dim // c.vision_n_heads
        self.wqkv = Biased(3 * c.vision_dim, c.vision_dim, out)
        self.wo = Biased(c.vision_dim, c.vision_dim, out)

    def forward(self, x: Tensor, patches: Patches, table: tuple[Tensor, Tensor]) -> Tensor:
        """[T, D] → [T, D]."""
        qkv = apply(Reshape((3 * self.heads, self.width)), self.wqkv(x))
        qkv = apply(RopeHalves(2 * self.heads), qkv, *table)
        o = apply(ImageAttention(self.width**-0.5), qkv, patches.begins, patches.ends)
        return self.wo(apply(Reshape((self.heads * self.width,)), o))  # type: ignore[no-any-return]


class ImageMlp(nn.Module):
    """Gated linear unit; `w1` holds gate and up."""

    def __init__(self, config: ModelConfig, arithmetic: Arithmetic) -> None:
        super().__init__()
        c, out = config, arithmetic.activation
        self.w1 = Linear(2 * c.vision_inter_dim, c.vision_dim, "bf16", out)
        self.w2 = Linear(c.vision_dim, c.vision_inter_dim, "bf16", out)

    def forward(self, x: Tensor) -> Tensor:
        """[T, D] → [T, D]."""
        return self.w2(apply(SwigluHalves(), self.w1(x)))  # type: ignore[no-any-return]


class ImageBlock(nn.Module):
    """A layer of the tower."""

    def __init__(self, config: ModelConfig, arithmetic: Arithmetic) -> None:
        super().__init__()
        self.add = Add(arithmetic.activation)
        self.norm1 = Norm(config.vision_dim, NORM_EPS)
        self.attn = ImageAttentionLayer(config, arithmetic)
        self.norm2 = Norm(config.vision_dim, NORM_EPS)
        self.mlp = ImageMlp(config, arithmetic)

    def forward(self, x: Tensor, patches: Patches, table: tuple[Tensor, Tensor]) -> Tensor:
        """[T, D] → [T, D]."""
        x = apply(self.add, x, self.attn(self.norm1(x), patches, table))
        return apply(self.add, x, self.mlp(self.norm2(x)))  # type: ignore[no-any-return]


class Tower(nn.Module):
    """The tensors `vision.*`."""

    blocks: Sequence[ImageBlock]

    def __init__(self, config: ModelConfig, arithmetic: Arithmetic) -> None:
        super().__init__()
        c = config
        self.angles = RopeTable(c.vision_dim // c.vision_n_heads // 2, c.vision_rope_theta, 1.0, 0, 32.0, 1.0, 0)
        self.patch_embed = PatchEmbed(c, arithmetic)
        self.blocks = nn.ModuleList(ImageBlock(c, arithmetic) for _ in range(c.vision_n_layers))  # type: ignore[assignment]
        self.norm = Norm(c.vision_dim, NORM_EPS)

    def forward(self, patches: Patches) -> Tensor:
        """[T, D] of the vision tower's width."""
        by_row, by_column = apply(self.angles, patches.rows), apply(self.angles, patches.columns)
        cos, sin = (apply(Concat(), row, column) for row, column in zip(by_row, by_column, strict=True))
        x = self.patch_embed.proj(patches.values)
        for block in self.blocks:
            x = block(x, patches, (cos, sin))
        return self.norm(x)  # type: ignore[no-any-return]


class Aligner(nn.Module):
    """The tensors `aligner.*`: blocks of patches to rows of the text model's width."""

    def __init__(self, config: ModelConfig, arithmetic: Arithmetic) -> None:
        super().__init__()
        c, out = config, arithmetic.activation
        self.w1 = Biased(c.dim, c.vision_downsample_ratio**2 * c.vision_dim, out)
        self.w2 = Biased(c.dim, c.dim, out)

    def forward(self, x: Tensor, sources: Tensor) -> Tensor:
        """[T, vision D] → [R, D]."""
        return self.w2(apply(Gelu(), self.w1(apply(MergePatches(), x, sources))))  # type: ignore[no-any-return]
