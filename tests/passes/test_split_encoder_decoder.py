"""split-encoder-decoder: the two graphs in a row are the one graph, bit for bit, and the encoder needs no decoder."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.traced import FOLDERS, context, traced, traced_in
from v41c.errors import VerifyError
from v41c.frontend.config import ModelConfig, parse_config
from v41c.frontend.tensor_names import TensorFormats
from v41c.frontend.trace import trace
from v41c.interpreted import InterpretedSubject
from v41c.ir.build import Builder
from v41c.ir.graph import Graph, Module
from v41c.ir.ops.attention import Attention
from v41c.ir.ops.cache_write import CacheWrite
from v41c.ir.ops.linear import Linear
from v41c.ir.ops.reshape import Reshape
from v41c.ir.ops.rms_norm import RmsNorm
from v41c.ir.text import parse_module, print_module
from v41c.ir.types import DType, TensorType, f32, i32
from v41c.passes import split_encoder_decoder as pass_
from v41c.subject import Arithmetic, unseen

RELEASE = context("release")


def split(case: str, arithmetic: Arithmetic = "release") -> Module:
    return pass_.run(traced_in(case, arithmetic)[1], context(arithmetic))


def feed(subject: InterpretedSubject, chunks: Sequence[int], seed: int) -> list[torch.Tensor]:
    """Logits of each chunk of random tokens."""
    tokens = np.random.default_rng(seed).integers(5, 500, sum(chunks))
    subject.start(len(tokens))
    ends = np.cumsum(chunks)
    return [torch.from_numpy(subject.feed(tokens[e - n : e], unseen)) for n, e in zip(chunks, ends, strict=True)]


def assert_same_bits(left: torch.Tensor, right: torch.Tensor, name: str) -> None:
    assert torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8)), name


@pytest.mark.parametrize(("case", "arithmetic"), [("case_00", "release"), ("case_04", "exact")])
@settings(max_examples=2, deadline=None, derandomize=True)
@given(chunks=st.lists(st.integers(1, 23), min_size=2, max_size=4), seed=st.integers(0, 99))
def test_encoder_then_decoder_is_the_model(case: str, arithmetic: Arithmetic, chunks: list[int], seed: int) -> None:
    source, whole = traced_in(case, arithmetic)
    one, two = (InterpretedSubject(source, m, arithmetic) for m in (whole, split(case, arithmetic)))
    for left, right in zip(feed(one, chunks, seed), feed(two, chunks, seed), strict=True):
        assert_same_bits(left, right, "logits")
    assert one.states.keys() == two.states.keys()
    for name, state in one.states.items():
        assert_same_bits(state, two.states[name], name)


@pytest.mark.parametrize("case", FOLDERS)
def test_what_crosses_is_the_stream_and_its_mix(case: str) -> None:
    module, config = split(case), traced(case)[0].config
    encoder, decoder = module["encoder"], module["decoder"]
    below = f"layers.{config.n_encoder_layers - 1}"
    crossing = {value.name for value in encoder.outputs}
    assert crossing == {f"{below}.out", f"{below}.pre_out"}
    inputs = {value.name for value in decoder.inputs} - crossing
    # a model with images looks at the tokens again: the router's bias depends on them
    assert inputs == {"positions", "slots", "first", "rows"} | ({"tokens"} if config.has_vision else set())
    assert encoder.outputs[0].type.shape[0] == encoder.outputs[1].type.shape[0] == "T"


@pytest.mark.parametrize("case", FOLDERS)
def test_each_layer_is_in_one_graph_and_global_rows_are_the_encoders(case: str) -> None:
    module, config = split(case), traced(case)[0].config
    encoder, decoder = module["encoder"], module["decoder"]
    first = config.n_encoder_layers

    def attends(graph: Graph) -> list[int]:
        return [int(n.origin.module.split(".")[1]) for n in graph.nodes if isinstance(n.op, Attention)]

    assert attends(encoder) == list(range(first))
    assert attends(decoder) == list(range(first, config.n_layers))
    written = [encoder.state_versions[old] for node in encoder.nodes for old, _ in node.consumed]
    assert {name for name in written if name.endswith((".compressed", ".index_keys", ".partial"))} == {
        f"layers.{source}.{kind}"
        for source in config.kv_source_layers
        for kind in ("compressed", "index_keys", *(("partial",) if config.ratio(source) > 1 else ()))
    }
    decoders = [decoder.state_versions[old] for node in decoder.nodes for old, _ in node.consumed]
    assert decoders == [f"layers.{layer}.window" for layer in range(first, config.n_layers)]


def test_nothing_expensive_is_computed_twice() -> None:
    """Of the decoder's first layer the encoder computes its norm and its compressor; the decoder repeats the norm."""
    whole, module = traced("tiny-v41")[1]["model"], split("tiny-v41")
    names = [
        value.name for graph in (module["encoder"], module["decoder"]) for node in graph.nodes for value in node.results
    ]
    twice = {name for name in names if names.count(name) > 1}
    assert len(names) - len(twice) == sum(len(node.results) for node in whole.nodes)
    producers = {value.name: node.op.name() for node in whole.nodes for value in node.results}
    assert {producers[name] for name in twice} == {"run_starts", "rope_table", "hc_mix", "rms_norm"}
    assert "layers.6.attn_in" in twice


def test_the_decoder_may_run_over_a_tail_alone() -> None:
    """Bounded replay: the encoder runs over all tokens; the decoder's window begins at the replay's start.

    Equal to the whole for prompts up to the replay, an approximation beyond it; encoder states never differ.
    """
    source, whole = traced_in("tiny-v41", "exact")
    module, window = split("tiny-v41", "exact"), source.config.window_size
    tokens = torch.from_numpy(np.random.default_rng(3).integers(5, 2000, 3 * window)).int()
    errors = []
    for count, replay in ((window, window), (3 * window, window), (3 * window, 2 * window), (3 * window, 3 * window)):
        reference = InterpretedSubject(source, whole, "exact")
        reference.start(count)
        wanted = torch.from_numpy(reference.feed(tokens[:count].numpy(), unseen)[-1])
        subject = InterpretedSubject(source, module, "exact")
        subject.start(count)
        encoded = subject.run(module["encoder"], subject.inputs(tokens[:count].numpy()), unseen)
        tail = {
            name: rows[count - replay :] for name, rows in (subject.inputs(tokens[:count].numpy()) | encoded).items()
        }
        tail |= {"first": torch.full((replay,), count - replay, dtype=torch.int32)}
        tail |= {"rows": torch.tensor([replay - 1], dtype=torch.int32)}
        found = subject.run(module["decoder"], tail, unseen)["logits"][0]
        errors.append(float((found - wanted).norm() / wanted.norm()))
        encoder_states = {state.name for state in module["encoder"].states}
        for name in encoder_states:
            assert_same_bits(subject.states[name], reference.states[name], name)
    assert errors[0] <= 1e-5
    assert errors[3] <= 1e-5
    assert errors[1] > 1e-4
    assert errors[2] < errors[1]


def mini(tail_of_attention: bool) -> Graph:
    """One layer that writes a compressed row, of its input as it must, or of its attention's output."""
    builder = Builder("model")
    x = builder.input("x", f32("T", 32))
    positions, slots, first = (builder.input(name, i32("T")) for name in ("positions", "slots", "first"))
    cache = builder.state("layers.0.compressed", f32("S", "C1", 32))
    window = builder.state("layers.0.window", f32("S", 8, 32))
    norm, sink = builder.weight("norm", f32(32)), builder.weight("sink", f32(2))
    (entering,) = builder.apply(RmsNorm(1e-6), x, norm, module="embed")
    (u,) = builder.apply(RmsNorm(1e-6), entering, norm, module="layers.0.attn_norm")
    q = builder.input("q", f32("T", 2, 32))
    operands = (q, u, sink, window, positions, slots, positions, first)
    (o,) = builder.apply(Attention(1.0, True), *operands, None, None, module="layers.0.attn")
    written = builder.apply(RmsNorm(1e-6), u, norm, module="layers.0.attn")[0]
    if tail_of_attention:
        (flat,) = builder.apply(Reshape((64,)), o, module="layers.0.attn")
        (written,) = builder.apply(Linear("f32"), flat, builder.weight("w", f32(32, 64)), None, module="layers.0.attn")
    write = CacheWrite(1, "fp4_e4m3_16")
    builder.apply(write, cache, written, positions, slots, first, module="layers.0.attn.compressor")
    return builder.finish(o)


def test_before_and_after_on_a_page() -> None:
    (encoder, decoder) = pass_.run(Module((mini(tail_of_attention=False),)), RELEASE)
    assert [node.op.name() for node in encoder.nodes] == ["rms_norm", "rms_norm", "rms_norm", "cache_write"]
    assert [node.op.name() for node in decoder.nodes] == ["rms_norm", "attention"]
    assert [value.name for value in encoder.outputs] == ["embed.rms_norm"]
    assert [value.name for value in decoder.inputs] == ["positions", "slots", "first", "q", "embed.rms_norm"]
    text = print_module(Module((encoder, decoder)))
    assert print_module(parse_module(text)) == text


def test_global_rows_of_attention_are_refused() -> None:
    """The proof: if a global row needed the decoder's own attention, the encoder could not run ahead."""
    message = (
        "layers.0.attn: global rows of layers.0 depend on attention: expected them to depend on the encoder's output"
    )
    with pytest.raises(VerifyError, match=message):
        pass_.run(Module((mini(tail_of_attention=True),)), RELEASE)


def plain_config(**changes: object) -> ModelConfig:
    """A model without a draft head, which is traced quickly."""
    return parse_config(traced("case_02")[0].config.to_flat() | changes)


def test_an_engram_in_the_decoder_forbids_the_bounded_replay() -> None:
    given = traced("case_00")[0].config.to_flat()
    engram = {key: value for key, value in given.items() if key.startswith("engram_")}
    config = plain_config(**engram | {"engram_layer_ids": [1, 4]})
    module = pass_.run(trace(config, TensorFormats.of(config)), RELEASE)
    module.verify()
    assert pass_.why_not_ced(module["decoder"]) == (
        "layers.4 has an Engram and stands in the decoder, which then needs every token"
    )
    assert pass_.why_not_ced(split("case_00")["decoder"]) == ""


def test_a_model_without_global_rows_is_cut_after_its_embedding() -> None:
    config = plain_config(compress_ratios=[0] * 6, kv_source_layers=[], index_source_layers=[])
    module = pass_.run(trace(config, TensorFormats.of(config)), RELEASE)
    module.verify()
    assert [weight.name for weight in module["encoder"].weights] == ["embed.weight"]
    assert [node.op.name() for node in module["encoder"].nodes][-2:] == ["embedding", "start_stream"]
    assert sum(isinstance(node.op, Attention) for node in module["decoder"].nodes) == config.n_layers


def test_other_graphs_pass_through() -> None:
    module = traced("case_00")[1]
    after = pass_.run(module, RELEASE)
    assert [graph.name for graph in after] == ["encoder", "decoder", "draft_context", "draft", "vision"]
    assert after["draft"] is module["draft"]
    twice = pass_.run(after, RELEASE)
    assert all(left is right for left, right in zip(twice, after, strict=True))


def test_states_keep_their_types() -> None:
    before = {state.name: state.type for state in traced("case_00")[1]["model"].states}
    after = split("case_00")
    found = {s.name: s.type for name in ("encoder", "decoder") for s in after[name].states}
    assert found == before
    assert found["layers.2.compressed"] == TensorType(DType.U8, ("S", "C2", 64 // 2 + 64 // 16))
