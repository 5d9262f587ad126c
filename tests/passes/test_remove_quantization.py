"""remove-quantization: nothing of the release's rounding is left, weights included.

That the interpreted result is the exact eager model to the last bit is in tests/test_interpreter.py.
"""

from __future__ import annotations

import pytest
import torch

from tests.traced import FOLDERS, context, traced, traced_in
from v41c.frontend import load
from v41c.frontend.checkpoint import Checkpoint
from v41c.frontend.loading import checkpoint_name
from v41c.frontend.weights import tensor_reader
from v41c.ir.ops.engram_lookup import EngramLookup
from v41c.ir.ops.moe_experts import MoeExperts
from v41c.ir.text import print_module
from v41c.ir.types import DType
from v41c.passes import remove_quantization as pass_
from v41c.passes import split_encoder_decoder

ROUNDED = (DType.BF16, DType.F8E4M3, DType.F4E2M1, DType.E8M0, DType.U8)


@pytest.mark.parametrize("case", FOLDERS)
def test_everything_is_f32_but_engram_tables(case: str) -> None:
    for graph in traced_in(case, "exact")[1]:
        tables = {v for node in graph.nodes if isinstance(node.op, EngramLookup) for v in node.operands}
        values = [*graph.inputs, *graph.weights, *graph.states, *(r for node in graph.nodes for r in node.results)]
        left = [value for value in values if value.type.dtype in ROUNDED and value not in tables]
        assert left == []
        for node in graph.nodes:
            assert node.op.name() != "round_trip"
            assert getattr(node.op, "out", "f32") == "f32"
            assert not isinstance(node.op, MoeExperts) or node.op.format == "none"


def test_release_arithmetic_is_left_as_it_is() -> None:
    module = traced("case_02")[1]
    assert pass_.run(module, context("release")) is module


def test_states_hold_elements_instead_of_packed_rows() -> None:
    source, before = traced("case_00")
    after = {state.name: state.type for graph in traced_in("case_00", "exact")[1] for state in graph.states}
    for state in (state for graph in before for state in graph.states):
        width = source.config.index_head_dim if state.name.endswith(".index_keys") else source.config.head_dim
        if state.type.dtype == DType.U8:
            assert after[state.name].shape == (*state.type.shape[:2], width)
        else:
            assert after[state.name] == state.type


@pytest.mark.parametrize("case", ["case_00", "case_02"])
def test_weights_are_read_at_their_exact_values(case: str) -> None:
    """What the loader gives for an f32 weight is what the exact eager model holds; stored codes times stored scales."""
    source, module = traced_in(case, "exact")
    checkpoint = Checkpoint(FOLDERS[case])
    read = tensor_reader(checkpoint, source.compressed_ids)
    model = load(str(FOLDERS[case]), "exact")
    named = {checkpoint_name(model, name): parameter for name, parameter in model.named_parameters()}
    weights = {value.name: value for graph in module for value in graph.weights}
    assert len(weights) > 100
    for name, value in weights.items():
        if name in named:
            assert torch.equal(read(value).view(torch.uint8), named[name].view(torch.uint8)), name
    fp8 = "layers.0.attn.wq_a" if case == "case_00" else ""
    if fp8:
        stored, scale = (checkpoint.tensor(f"{fp8}.{part}") for part in ("weight", "scale"))
        by_hand = stored.float()[37, 70] * 2.0 ** (int(scale.view(torch.uint8)[1, 2]) - 127)
        assert read(weights[f"{fp8}.weight"])[37, 70] == by_hand


def test_the_order_of_this_pass_and_the_cut_does_not_matter() -> None:
    module = traced("case_04")[1]
    exact = context("exact")
    one = split_encoder_decoder.run(pass_.run(module, exact), exact)
    other = pass_.run(split_encoder_decoder.run(module, exact), exact)
    assert print_module(one) == print_module(other)
