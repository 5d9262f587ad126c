"""Tracing: one operation per node, named and placed as the eager model has it, without a weight in memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.traced import FOLDERS, traced
from v41c.compile import trace_source
from v41c.errors import TraceError
from v41c.frontend.checkpoint import Checkpoint
from v41c.frontend.layers import Norm
from v41c.frontend.loading import skeleton
from v41c.frontend.model import Model
from v41c.frontend.moe import Moe
from v41c.frontend.trace import COMPRESSED_IDS
from v41c.ir.text import print_module
from v41c.subject import INTEGERS, STREAMS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("case", FOLDERS)
def test_every_weight_of_the_checkpoint_is_read_by_a_graph(case: str) -> None:
    source, module = traced(case)
    named = {value.name for graph in module for value in graph.weights}
    config = source.config
    experts = {"layers": config.n_routed_experts, "mtp": config.draft_routed_experts}
    spelled = {
        name.replace("{}", str(expert))
        for name in named - {COMPRESSED_IDS}
        for expert in range(experts.get(name.split(".")[0], 1) if "{}" in name else 1)
    }
    # drafts are text: their routers never use the bias of images
    unread = {f"mtp.{index}.ffn.gate.bias_vl" for index in range(config.n_mtp_layers)}
    assert spelled == set(Checkpoint(FOLDERS[case])) - unread
    assert (COMPRESSED_IDS in named) == config.has_engram


@pytest.mark.parametrize("case", FOLDERS)
def test_landmarks_name_values(case: str) -> None:
    source, module = traced(case)
    config = source.config
    model = {value.name for node in module["model"].nodes for value in node.results}
    for layer in range(config.n_layers):
        for kind in STREAMS[1:]:
            assert f"layers.{layer}.{kind}" in model
        assert f"layers.{layer}.experts" in model
        # where nothing stands between two layers the value is named after the lower one
        assert (f"layers.{layer}.in" in model) == (layer == 0 or layer in config.engram_layer_ids)
        assert (f"layers.{layer}.selection" in model) == (layer in config.index_source_layers)
        assert (f"layers.{layer}.pool" in model) == (layer == config.candidate_source_layer)
        assert (f"layers.{layer}.engram_rows" in model) == (layer in config.engram_layer_ids)
    outputs = [value.name for value in module["model"].outputs]
    assert outputs == ["logits", *(("main_hidden",) if config.has_draft else ())]
    assert all(kind in {"engram_rows", "selection", "pool", "experts"} for kind in INTEGERS)


@pytest.mark.parametrize("case", FOLDERS)
def test_every_operation_knows_its_module(case: str) -> None:
    source, module = traced(case)
    with torch.device("meta"):
        modules = {name for name, _ in skeleton(source.config, source.formats).named_modules()}
    for graph in module:
        for node in graph.nodes:
            assert node.origin.module in modules
            assert node.origin.made_by == "trace"
    inside = {node.origin.module.split(".")[0] for node in module["model"].nodes}
    assert inside == {"", "layers", "norm"}


@pytest.mark.parametrize("case", FOLDERS)
def test_dimensions_are_named(case: str) -> None:
    """Tokens, logit rows, slots and capacities by ratio are symbols; nothing else is, and no example size is left."""
    source, module = traced(case)
    ratios = {f"C{ratio}" for ratio in set(source.config.compress_ratios) - {0}}
    symbols = {
        dim
        for graph in module
        for value in (*graph.inputs, *graph.states, *(r for node in graph.nodes for r in node.results))
        for dim in value.type.symbols
    }
    assert symbols == {"T", "R", "S", *ratios}
    sizes = {
        dim
        for graph in module
        for node in graph.nodes
        for result in node.results[len(node.op.states) :]
        for dim in result.type.shape[:1]
    }
    assert sizes == {"T", "R"}


def test_the_same_checkpoint_gives_the_same_text() -> None:
    source, module = traced("case_02")
    assert print_module(trace_source(source)) == print_module(module)


def test_tracing_leaves_the_eager_model_usable() -> None:
    from v41c.frontend import load

    trace_source(traced("case_02")[0])
    with torch.inference_mode():
        assert load(str(FOLDERS["case_02"]))(torch.arange(5, 9)).isfinite().all()


def sine(self: Norm, x: Tensor) -> Tensor:
    return torch.sin(x)


def subtraction(self: Moe, u: Tensor, step: object) -> Tensor:
    return u - u


def branch(self: Norm, x: Tensor) -> Tensor:
    return x if bool(x.sum() > 0) else -x


@pytest.mark.parametrize(
    ("owner", "forward", "message"),
    [
        (
            Norm,
            sine,
            r"^layers\.0\.attn_norm: unknown operation aten\.sin\.default: expected an operation of v41c\.ir\.ops",
        ),
        (Moe, subtraction, r"^layers\.0\.ffn: unknown operation aten\.sub\.Tensor: expected"),
    ],
)
def test_an_unknown_operation_is_named_with_its_module(
    owner: type, forward: object, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, "forward", forward)
    with pytest.raises(TraceError, match=message) as error:
        trace_source(traced("case_02")[0])
    assert "\n" not in str(error.value)


def test_a_known_torch_operation_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain additions of tensors of one shape may stand in a model."""
    plain = Norm.forward

    def doubled(self: Norm, x: Tensor) -> Tensor:
        return plain(self, x + x)

    monkeypatch.setattr(Norm, "forward", doubled)
    module = trace_source(traced("case_02")[0])
    assert any(node.op.name() == "add" and node.origin.module.endswith("norm") for node in module["model"].nodes)


def test_a_model_that_looks_at_its_data_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Norm, "forward", branch)
    with pytest.raises(TraceError, match=r"^graph model: expected a model whose operations hang on no data: Could not"):
        trace_source(traced("case_02")[0])


def test_states_are_the_eager_models() -> None:
    for case in FOLDERS:
        source, module = traced(case)
        with torch.device("meta"):
            model: Model = skeleton(source.config, source.formats)
            states = model.new_states(1, 24)
        found = {state.name: state.type for graph in module for state in graph.states}
        assert found.keys() == states.keys()
        for name, state in states.items():
            bound = found[name].bind({"S": 1, "C1": 24, "C2": 12, "C4": 6})
            assert tuple(bound.shape) == tuple(state.shape), name
