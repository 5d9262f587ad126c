"""CSA2 attention: window keys of the layer, compressed rows of the last KV source, selected by the last index source.

DeepSeek-V4.1 report, section 2.3. Modes: `window` layers see their ring only; `full` layers make compressed rows and
index keys and select; `reindex` layers select again over the last source's keys; `reuse` layers use the last selection.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from v41c.frontend.apply import apply
from v41c.frontend.arithmetic import INDEX, Arithmetic
from v41c.frontend.config import ModelConfig
from v41c.frontend.layers import Format, Linear, Norm, Step, parameter
from v41c.ir.ops.attention import Attention as AttentionOp
from v41c.ir.ops.cache_write import CacheWrite
from v41c.ir.ops.candidate_blocks import CandidateBlocks
from v41c.ir.ops.compress_pool import CompressPool
from v41c.ir.ops.grouped_linear import GroupedLinear
from v41c.ir.ops.index_topk import IndexTopk
from v41c.ir.ops.reshape import Reshape
from v41c.ir.ops.rope import Rope
from v41c.ir.ops.window_write import WindowWrite


class Attention(nn.Module):
    """One attention sublayer. `layer` counts draft layers after the backbone's; `name` is its checkpoint name."""

    def __init__(
        self, config: ModelConfig, arithmetic: Arithmetic, layer: int, name: str, dense: Format, wo_a: Format
    ) -> None:
        super().__init__()
        c, out = config, arithmetic.activation
        self.config, self.layer, self.name = c, layer, name
        self.quantized = dense == "fp8"
        self.mode, self.ratio = c.mode(layer), c.ratio(layer)
        self.attn_sink = parameter(torch.float32, c.n_heads)
        self.wq_a = Linear(c.q_lora_rank, c.dim, dense, out)
        self.q_norm = Norm(c.q_lora_rank, c.norm_eps)
        self.wq_b = Linear(c.n_heads * c.head_dim, c.q_lora_rank, dense, out)
        self.wkv = Linear(c.head_dim, c.dim, dense, out)
        self.kv_norm = Norm(c.head_dim, c.norm_eps)
        self.wo_a = Linear(c.o_groups * c.o_lora_rank, c.n_heads * c.head_dim // c.o_groups, wo_a, out)
        self.wo_b = Linear(c.dim, c.o_groups * c.o_lora_rank, dense, out)
        if self.mode == "full":
            self.compressor = Compressor(c, arithmetic, self.ratio)
        if self.mode in ("full", "reindex"):
            self.indexer = Indexer(c, arithmetic, layer, dense)

    def forward(self, u: Tensor, step: Step, causal: bool = True) -> Tensor:
        """[T, D] → [T, D]. A draft block (`causal=False`) sees itself whole and leaves the ring as it is."""
        c = self.config
        x = self._quantize(u, step)
        table = step.tables[self.ratio, 0]
        qr = self._quantize(self.q_norm(self.wq_a(x)), step)
        q = apply(Reshape((c.n_heads, c.head_dim)), self.wq_b(qr))
        q = apply(Rope(inverse=False), q, *table)
        kv = self.window_keys(x, step)
        rows, selection = self._compressed(u, qr, step) if self.ratio else (None, None)
        window = step.states[f"{self.name}.window"]
        o = apply(
            AttentionOp(c.head_dim**-0.5, causal),
            q,
            kv,
            self.attn_sink,
            window,
            step.positions,
            step.slots,
            step.starts,
            step.first,
            rows,
            selection,
        )
        if causal:
            apply(WindowWrite(), window, kv, step.positions, step.slots)
        o = apply(Rope(inverse=True), o, *table)
        groups = apply(Reshape((c.o_groups, c.n_heads * c.head_dim // c.o_groups)), o)
        z = apply(GroupedLinear(), groups, self.wo_a.weight, self.wo_a.scale)
        return self.wo_b(self._quantize(z, step))  # type: ignore[no-any-return]

    def window_keys(self, x: Tensor, step: Step) -> Tensor:
        """Window entries [T, HD] of sublayer inputs [T, D] that are already quantised."""
        kv = apply(Rope(inverse=False), self.kv_norm(self.wkv(x)), *step.tables[self.ratio, 0])
        return step.arithmetic.quantize(kv)

    def _quantize(self, x: Tensor, step: Step) -> Tensor:
        return step.arithmetic.quantize(x) if self.quantized else x

    def _compressed(self, u: Tensor, qr: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        """The compressed cache this layer reads, and its selection [T, index_topk]."""
        c, layer = self.config, self.layer
        source = f"layers.{c.kv_source(layer)}"
        if self.mode == "full":
            latent = self.compressor(u, step, source)
            self.indexer.write_keys(latent, step, source)
        if self.mode in ("full", "reindex"):
            step.selections[layer] = self.indexer.select(u, qr, step, source)
            step.record(f"{self.name}.selection", step.selections[layer])
        selector = c.index_source(layer)
        if selector is None:
            raise ValueError(f"{self.name}: expected an index source at or below it")
        return step.states[f"{source}.compressed"], step.selections[selector]


class Compressor(nn.Module):
    """Latents of groups of `ratio` tokens, and their rows in the compressed cache."""

    def __init__(self, config: ModelConfig, arithmetic: Arithmetic, ratio: int) -> None:
        super().__init__()
        c = config
        self.ratio, self.out = ratio, arithmetic.activation
        pooled = ratio > 1
        self.wkv = Linear(c.head_dim, c.dim, "bf16", "f32" if pooled else self.out)
        self.norm = Norm(c.head_dim, c.norm_eps)
        if pooled:
            self.wgate = Linear(c.head_dim, c.dim, "bf16", "f32")

    def forward(self, u: Tensor, step: Step, source: str) -> Tensor:
        """Latents [T, HD] before rope; rows of tokens that close no group are zero."""
        pooled = self.wkv(u)
        if self.ratio > 1:
            partial = step.states[f"{source}.partial"]
            pool = CompressPool(self.ratio, self.out)
            pooled = apply(pool, partial, pooled, self.wgate(u), step.positions, step.slots, step.starts)
        latent = self.norm(pooled)
        rows = apply(Rope(inverse=False), latent, *step.tables[self.ratio, 1 - self.ratio])
        write = CacheWrite(self.ratio, "fp4_e4m3_16")
        apply(write, step.states[f"{source}.compressed"], rows, step.positions, step.slots, step.kept)
        return latent  # type: ignore[no-any-return]


class Indexer(nn.Module):
    """Selects compressed rows by rectified query-key products, weighted over index heads."""

    def __init__(self, config: ModelConfig, arithmetic: Arithmetic, layer: int, dense: Format) -> None:
        super().__init__()
        c, out = config, arithmetic.activation
        self.config, self.layer = c, layer
        self.wq_b = Linear(c.index_n_heads * c.index_head_dim, c.q_lora_rank, dense, out)
        self.weights_proj = Linear(c.index_n_heads, c.dim, "bf16", out)
        if c.mode(layer) == "full":
            self.wk = Linear(c.index_head_dim, c.head_dim, "bf16", out)
            self.k_norm = Norm(c.index_head_dim, c.norm_eps)

    def write_keys(self, latent: Tensor, step: Step, source: str) -> None:
        """Publish the index keys of latents [T, HD] in this source's own cache, before anything selects."""
        ratio = self.config.ratio(self.layer)
        keys = apply(Rope(inverse=False), self.k_norm(self.wk(latent)), *step.tables[ratio, 1 - ratio])
        write = CacheWrite(ratio, INDEX)
        apply(write, step.states[f"{source}.index_keys"], keys, step.positions, step.slots, step.kept)

    def select(self, u: Tensor, qr: Tensor, step: Step, source: str) -> Tensor:
        """Selection i32 [T, index_topk]; at the candidate source the pool of later selections as well."""
        c = self.config
        ratio, keys = c.ratio(self.layer), step.states[f"{source}.index_keys"]
        q = apply(Reshape((c.index_n_heads, c.index_head_dim)), self.wq_b(qr))
        q = step.arithmetic.quantize(apply(Rope(inverse=False), q, *step.tables[ratio, 0]), INDEX)
        weights = self.weights_proj(u)
        scale = (c.index_head_dim * c.index_n_heads) ** -0.5
        scored = (q, weights, keys, step.positions, step.slots)
        if self.layer == c.candidate_source_layer:
            blocks = CandidateBlocks(ratio, c.candidate_topk_blocks, c.candidate_block_size, scale)
            step.pool = apply(blocks, *scored)
            step.record(f"layers.{self.layer}.pool", step.pool)
        pool = step.pool if c.candidate_source(self.layer) is not None else None
        topk = IndexTopk(ratio, c.index_topk, scale, c.candidate_block_size)
        return apply(topk, *scored, pool)  # type: ignore[no-any-return]
