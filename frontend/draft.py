"""The draft head (DSpark; DeepSeek-V4.1 report, section 2.4.3): window-mode layers over the backbone's own streams."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from v41c.frontend.apply import apply
from v41c.frontend.arithmetic import Arithmetic
from v41c.frontend.block import Block
from v41c.frontend.config import ModelConfig
from v41c.frontend.layers import Format, Linear, Norm, Step, Table
from v41c.frontend.tensor_names import TensorFormats
from v41c.ir.ops.concat import Concat
from v41c.ir.ops.embedding import Embedding
from v41c.ir.ops.hc_mix import HcMix
from v41c.ir.ops.linear import Linear as LinearOp
from v41c.ir.ops.markov_chain import MarkovChain
from v41c.ir.ops.start_stream import StartStream
from v41c.ir.ops.window_write import WindowWrite


class DraftBlock(Block):
    """A draft layer. The first holds the input projection, the last the heads."""

    def __init__(self, config: ModelConfig, arithmetic: Arithmetic, index: int, formats: TensorFormats) -> None:
        c = config
        super().__init__(c, arithmetic, c.n_layers + index, formats, 0)
        if index == 0:
            dense: Format = "fp8" if c.dtype == "fp8" else "bf16"
            columns = len(c.dspark_target_layer_ids) * c.dim
            self.main_proj = Linear(c.dim, columns, dense, arithmetic.activation)
            self.main_norm = Norm(c.dim, c.norm_eps)
        if index == c.n_mtp_layers - 1:
            self.norm = Norm(c.dim, c.norm_eps)
            self.markov_head = MarkovHead(c.vocab_size, c.dspark_markov_rank)
            self.confidence_head = ConfidenceHead(c.dim + c.dspark_markov_rank)


class MarkovHead(nn.Module):
    """Bias of the next draft's logits by the token before it: a low-rank table and its projection."""

    def __init__(self, vocabulary: int, rank: int) -> None:
        super().__init__()
        self.embed = Table(vocabulary, rank, "bf16")
        self.head = Table(vocabulary, rank, "bf16")


class ConfidenceHead(nn.Module):
    """Logit of a draft's conditional acceptance probability."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = Table(1, width, "bf16")


def write_context(blocks: Sequence[DraftBlock], main_hidden: Tensor, step: Step) -> None:
    """Put the window entries of backbone positions into the draft rings. `main_hidden` [T, targets·D]."""
    first = blocks[0]
    quantized = first.attn.quantized
    x = step.arithmetic.quantize(main_hidden) if quantized else main_hidden
    main_x = first.main_norm(first.main_proj(x))
    x = step.arithmetic.quantize(main_x) if quantized else main_x
    for block in blocks:
        kv = block.attn.window_keys(x, step)
        apply(WindowWrite(), step.states[f"{block.name}.window"], kv, step.positions, step.slots)


def propose(
    blocks: Sequence[DraftBlock], embed: Tensor, head: Tensor, copies: int, step: Step
) -> tuple[Tensor, Tensor, Tensor]:
    """One draft step of blocks [last, noise, …]: logits f32 [T, V], drafts i32 [T], confidence f32 [T, 1].

    Logits include the Markov bias of the token before; drafts are its greedy choices.
    """
    last = blocks[-1]
    out = step.arithmetic.activation
    stream, mix = apply(StartStream(copies), apply(Embedding(out), step.tokens, embed))
    for block in blocks:
        stream, mix = block(stream, mix, step, causal=False)
    hidden = apply(HcMix(), stream, mix)
    base = apply(LinearOp("f32"), last.norm(hidden), head, None)
    markov = last.markov_head
    chain = (markov.embed.weight, markov.head.weight)
    logits, inputs, drafts = apply(MarkovChain(), base, step.tokens, step.starts, *chain)
    joined = apply(Concat(), hidden, apply(Embedding(out), inputs, markov.embed.weight))
    confidence = apply(LinearOp("f32"), joined, last.confidence_head.proj.weight, None)
    return logits, drafts, confidence
