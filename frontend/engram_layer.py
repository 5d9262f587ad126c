"""The Engram of a layer: n-gram rows of a large table, projected to keys and a value, gated onto the stream."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from v41c.frontend.apply import apply
from v41c.frontend.arithmetic import Arithmetic
from v41c.frontend.config import ModelConfig
from v41c.frontend.engram import multipliers, offsets, primes
from v41c.frontend.layers import Format, Linear, Step, Table, parameter
from v41c.ir.ops.engram_gate import EngramGate
from v41c.ir.ops.engram_hash import EngramHash
from v41c.ir.ops.engram_lookup import EngramLookup


class Engram(nn.Module):
    """One layer's lookup (DeepSeek-V4.1 report, section 2.2). `pad` is the compressed id of the pad token."""

    def __init__(
        self, config: ModelConfig, arithmetic: Arithmetic, layer: int, pad: int, dense: Format, table: Format
    ) -> None:
        super().__init__()
        c = config
        self.name, self.quantized = f"layers.{layer}", dense == "fp8"
        self.hash = EngramHash(multipliers(layer, c), primes(c)[layer], offsets(c)[layer], pad)
        self.lookup = EngramLookup(arithmetic.activation)
        self.gate = EngramGate(c.norm_eps)
        rows = c.engram_num_embeddings[c.engram_layer_ids.index(layer)]
        self.embed = Table(rows, c.engram_head_dim, table)
        self.wkv = Linear((c.hc_mult + 1) * c.dim, c.engram_columns * c.engram_head_dim, dense, arithmetic.activation)
        self.q_weight = parameter(torch.bfloat16, c.hc_mult, c.dim)
        self.k_weight = parameter(torch.bfloat16, c.hc_mult, c.dim)

    def forward(self, stream: Tensor, step: Step) -> Tensor:
        """[T, N, D] → [T, N, D]."""
        history = step.states["engram.history"]
        rows = apply(self.hash, step.compressed_ids, history, step.positions, step.slots, step.starts)
        step.record(f"{self.name}.engram_rows", rows)
        e = apply(self.lookup, rows, self.embed.weight, self.embed.scale)
        kv = self.wkv(step.arithmetic.quantize(e) if self.quantized else e)
        return apply(self.gate, stream, kv, self.q_weight, self.k_weight, step.image)  # type: ignore[no-any-return]
