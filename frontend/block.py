"""A layer: attention and experts, joined by the Single-Pass mHC residual (DeepSeek-V4.1 report, section 2.4.1)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from v41c.frontend.apply import apply
from v41c.frontend.arithmetic import Arithmetic
from v41c.frontend.attention import Attention
from v41c.frontend.config import ModelConfig
from v41c.frontend.engram_layer import Engram
from v41c.frontend.layers import Format, Norm, Step, parameter
from v41c.frontend.moe import Moe
from v41c.frontend.tensor_names import TensorFormats
from v41c.ir.ops.hc_coefficients import HcCoefficients
from v41c.ir.ops.hc_mix import HcMix
from v41c.ir.ops.hc_update import HcUpdate


class Block(nn.Module):
    """One layer of the backbone or of the draft head.

    A sublayer reads the stream collapsed with the `pre` coefficients that the sublayer before it predicted, and
    predicts those of the next.
    """

    def __init__(
        self, config: ModelConfig, arithmetic: Arithmetic, layer: int, formats: TensorFormats, pad: int
    ) -> None:
        super().__init__()
        c = config
        draft = layer >= c.n_layers
        self.name = f"mtp.{layer - c.n_layers}" if draft else f"layers.{layer}"
        experts = (c.draft_routed_experts, c.draft_activated_experts)
        if not draft:
            experts = (c.n_routed_experts, c.n_activated_experts)
        dense: Format = "fp8" if c.dtype == "fp8" else "bf16"
        expert: Format = "fp4" if c.expert_dtype == "fp4" else "fp8" if c.expert_dtype == "fp8" else "bf16"
        self.coefficients = HcCoefficients(c.norm_eps, c.hc_eps, c.hc_sinkhorn_iters)
        outputs = (2 + c.hc_mult) * c.hc_mult
        for sublayer in ("attn", "ffn"):
            self.register_parameter(f"hc_{sublayer}_fn", parameter(torch.float32, outputs, c.hc_mult * c.dim))
            self.register_parameter(f"hc_{sublayer}_scale", parameter(torch.float32, 3))
            self.register_parameter(f"hc_{sublayer}_base", parameter(torch.float32, outputs))
        if layer in c.engram_layer_ids:
            self.engram = Engram(c, arithmetic, layer, pad, dense, formats.engram_table)
        self.attn_norm = Norm(c.dim, c.norm_eps)
        self.attn = Attention(c, arithmetic, layer, self.name, dense, formats.wo_a)
        self.ffn_norm = Norm(c.dim, c.norm_eps)
        self.ffn = Moe(c, arithmetic, self.name, experts, dense, expert)

    def add_engram(self, stream: Tensor, step: Step) -> Tensor:
        """The stream entering the layer [T, N, D], after its Engram if it has one."""
        return self.engram(stream, step) if hasattr(self, "engram") else stream

    def forward(self, stream: Tensor, mix: Tensor, step: Step, causal: bool = True) -> tuple[Tensor, Tensor]:
        """Stream [T, N, D] and mix [T, N] → the same after the layer."""
        name = self.name
        pre, post, comb = self._coefficients("attn", stream)
        u = self.attn_norm(apply(HcMix(), stream, mix))
        step.record(f"{name}.attn_in", u)
        y = self.attn(u, step, causal)
        step.record(f"{name}.attn_out", y)
        stream = apply(HcUpdate(), stream, y, post, comb)
        next_pre, post, comb = self._coefficients("ffn", stream)
        u = self.ffn_norm(apply(HcMix(), stream, pre))
        step.record(f"{name}.ffn_in", u)
        y = self.ffn(u, step)
        step.record(f"{name}.ffn_out", y)
        stream = apply(HcUpdate(), stream, y, post, comb)
        step.record(f"{name}.out", stream)
        step.record(f"{name}.pre_out", next_pre)
        return stream, next_pre

    def _coefficients(self, sublayer: str, stream: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        parameters = (getattr(self, f"hc_{sublayer}_{part}") for part in ("fn", "scale", "base"))
        return apply(self.coefficients, stream, *parameters)  # type: ignore[no-any-return]
