"""PyTorch as the opponent of a benchmark: the eager model in the form in which PyTorch runs it fastest.

f32 arithmetic, every weight dequantised once, no quantisation round trips: less work per token than the model's own
arithmetic, and no bf16 products, which CPUs without bf16 units emulate.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from v41c.errors import UnsupportedError
from v41c.frontend.apply import apply, opaque
from v41c.frontend.layers import Step
from v41c.frontend.loading import load, set_parameter
from v41c.frontend.model import Model
from v41c.ir.formats import decode_e8m0
from v41c.ir.op import Op
from v41c.ir.ops.attention import Attention
from v41c.ir.ops.cache_write import CacheWrite
from v41c.ir.ops.candidate_blocks import CandidateBlocks
from v41c.ir.ops.compress_pool import CompressPool
from v41c.ir.ops.gather_rows import GatherRows
from v41c.ir.ops.hc_mix import HcMix
from v41c.ir.ops.history_write import HistoryWrite
from v41c.ir.ops.index_topk import IndexTopk
from v41c.ir.ops.linear import Linear
from v41c.ir.ops.moe_experts import MoeExperts
from v41c.ir.ops.window_write import WindowWrite

#: operations whose Python depends on data: they would cut torch.compile's graph into hundreds of pieces
_DATA_DEPENDENT: frozenset[type[Op]] = frozenset(
    {CacheWrite, CandidateBlocks, CompressPool, HistoryWrite, IndexTopk, MoeExperts, WindowWrite}
)
#: and attention over many tokens, whose tiles would be unrolled
_OF_MANY_TOKENS: frozenset[type[Op]] = _DATA_DEPENDENT | {Attention}


States = dict[str, Tensor]


class Baseline:
    """The eager model of a checkpoint. Every way to feed tokens i32 [T] gives the last one's logits f32 [V]."""

    def __init__(self, checkpoint: Path) -> None:
        self.model = load(checkpoint, "exact")
        _dequantize_tables(self.model)
        # one for each set of operations that stays opaque
        self._one = torch.compile(self._step, fullgraph=True, dynamic=False)
        self._many = torch.compile(self._step, fullgraph=True, dynamic=False)

    def new_states(self, context: int) -> States:
        """An empty sequence of up to `context` tokens."""
        return self.model.new_states(1, context)

    def full(self, tokens: Tensor, states: States, position: int = 0) -> Tensor:
        """Every layer over every token."""
        with torch.inference_mode():
            return self._step(*_places(tokens, position), states)

    def compiled(self, tokens: Tensor, states: States, position: int = 0) -> Tensor:
        """The same through torch.compile. The first call with a number of tokens compiles: minutes."""
        several = len(tokens) > 1
        step, leave_out = (self._many, _OF_MANY_TOKENS) if several else (self._one, _DATA_DEPENDENT)
        with torch.inference_mode(), opaque(leave_out):
            try:
                logits: Tensor = step(*_places(tokens, position), states)
            except torch._dynamo.exc.TorchDynamoException as error:
                reason = " ".join(str(error).split("\n")[:2])
                raise UnsupportedError(f"torch.compile of the eager model on this machine: {reason}") from error
        return logits

    def ced(self, tokens: Tensor, states: States) -> Tensor:
        """The causal encoder-decoder prefill of a whole prompt: the layers from the last KV source on a tail only.

        Without a source these are all layers. The tail is the window, longer by less than a compression group so that
        it begins with a whole one.
        """
        with torch.inference_mode():
            return self._ced(tokens, states)

    def _step(self, tokens: Tensor, positions: Tensor, zeros: Tensor, last: Tensor, states: States) -> Tensor:
        return self.model.step(tokens, positions, zeros, zeros, last, states)[0][0]

    def _ced(self, tokens: Tensor, states: States) -> Tensor:
        model, c = self.model, self.model.config
        source = c.kv_source_layers[-1] if c.kv_source_layers else 0
        tokens, positions, zeros, _ = _places(tokens, 0)
        step = model.new_step(tokens, positions, zeros, zeros, states)
        stream, mix = model.embed_tokens(step)
        stream, mix = self._layers(0, source, stream, mix, step)
        if c.has_engram:
            apply(HistoryWrite(), states["engram.history"], step.compressed_ids, positions, zeros)
        if c.kv_source_layers:
            first = model.layers[source]
            u = first.attn_norm(apply(HcMix(), stream, mix))
            latent = first.attn.compressor(u, step, first.name)
            first.attn.indexer.write_keys(latent, step, first.name)
        begin = max(0, len(tokens) - c.window_size)
        begin -= begin % max(1, c.ratio(source))
        tail = slice(begin, None)
        cut = torch.full_like(zeros[tail], begin)
        step = model.new_step(tokens[tail], positions[tail], zeros[tail], cut, states)
        stream, mix = self._layers(source, c.n_layers, stream[tail], mix[tail], step)
        last = torch.tensor([len(stream) - 1], dtype=torch.int32)
        hidden = model.norm(apply(GatherRows(), apply(HcMix(), stream, mix), last))
        logits: Tensor = apply(Linear("f32"), hidden, model.head.weight, None)[0]
        return logits

    def _layers(self, begin: int, end: int, stream: Tensor, mix: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        for block in list(self.model.layers)[begin:end]:
            stream, mix = block(block.add_engram(stream, step), mix, step)
        return stream, mix


def _places(tokens: Tensor, position: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens, their positions, a zero for each, and the last row: all i32."""
    count = len(tokens)
    positions = torch.arange(position, position + count, dtype=torch.int32)
    return tokens, positions, torch.zeros_like(positions), torch.tensor([count - 1], dtype=torch.int32)


def _dequantize_tables(model: Model) -> None:
    """Make the Engram tables f32 too: torch.compile knows no ue8m0."""
    for layer in model.config.engram_layer_ids:
        table = model.layers[layer].engram.embed
        if table.scale is not None:
            groups = table.weight.float().unflatten(-1, (-1, 32))
            set_parameter(table, "weight", (groups * decode_e8m0(table.scale.data).unsqueeze(-1)).flatten(-2))
            table.scale = None
