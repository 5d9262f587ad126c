"""Rules every pass obeys alone, over every pass found in the pipeline: its golden file, and the model it leaves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from tests.traced import traced
from v41c.compile import Source, quantized_source
from v41c.frontend.quantized_checkpoint import quantized_types
from v41c.interpreted import InterpretedSubject
from v41c.ir.graph import Module
from v41c.ir.text import parse_module, print_module
from v41c.passes import plan_memory, quantize, remove_quantization, reorder_sparse_gathers, select_kernels
from v41c.passes.context import PassContext
from v41c.passes.pipeline import PIPELINE
from v41c.subject import unseen

GOLDEN = Path(__file__).parents[1] / "golden"
#: what they leave is another model, near and not the same
CHANGING = (quantize, remove_quantization)
#: on which every gathering pays and no table stays in memory
MACHINE = SimpleNamespace(
    name="none",
    kept_bytes=0,
    memory_bytes_per_second=1e30,
    dequantised_per_second=1.0,
    launch_seconds=0.0,
    runs_aside=False,
    shares_index_scores=True,
    packs_activations=True,
    has_block_scaled_mma=True,
)
PASSES = [pytest.param(entry, id=entry.NAME) for entry, _ in PIPELINE]


def context_of(pass_: ModuleType) -> PassContext:
    """Exact arithmetic for the pass that only then does something; kernels named after their operation."""
    arithmetic = "exact" if pass_ is remove_quantization else "release"

    def kernel(op: object, *_: object) -> SimpleNamespace:
        return SimpleNamespace(symbol=f"{op.name()}_kernel", workspace_bytes=0)  # type: ignore[attr-defined]

    types = quantized_types(traced("case_02")[0].config)
    return PassContext(arithmetic, kernel, (3,), {"S": 1, "C1": 64, "C2": 32, "C4": 16}, types, MACHINE)  # type: ignore[arg-type]


def alone(pass_: ModuleType, module: Module) -> Module:
    """The pass after nothing but what it cannot do without: the last ones work on selected kernels."""
    context = context_of(pass_)
    if pass_ in (reorder_sparse_gathers, plan_memory):
        module = select_kernels.run(module, context)
    after: Module = pass_.run(module, context)
    after.verify()
    return after


def source_after(pass_: ModuleType, source: Source) -> Source:
    """What the weights of the pass's graphs are read from."""
    return quantized_source(source) if pass_ is quantize else source


@pytest.mark.parametrize("pass_", PASSES)
def test_golden_file(pass_: ModuleType, request: pytest.FixtureRequest) -> None:
    """One page shows what the pass does; its text is read back to the same graphs."""
    file = GOLDEN / f"{pass_.NAME.replace('-', '_')}.ir"
    before, _, expected = file.read_text().partition("-----\n")
    module = parse_module(before)
    assert print_module(module).strip() == before.strip()
    found = print_module(alone(pass_, module))
    if request.config.getoption("--update-golden"):
        file.write_text(f"{before}-----\n{found}")
        expected = found
    assert found == expected
    assert print_module(parse_module(found)) == found
    assert len(file.read_text().splitlines()) <= 40


def test_every_golden_file_is_a_passs() -> None:
    names = {entry.NAME.replace("-", "_") for entry, _ in PIPELINE}
    assert {file.stem for file in GOLDEN.glob("*.ir")} == names


@pytest.mark.parametrize("pass_", PASSES)
def test_the_model_is_the_same_after_the_pass(pass_: ModuleType) -> None:
    """Interpreted on random tokens in chunks: logits and states to the last bit."""
    source, module = traced("case_02")
    after = alone(pass_, module)
    renamed = Module(tuple(replace(graph, name=graph.name.partition(":")[0]) for graph in after))
    arithmetic = context_of(pass_).arithmetic
    before = InterpretedSubject(source, module, "release")
    subject = InterpretedSubject(source_after(pass_, source), renamed, arithmetic)
    tokens = np.random.default_rng(11).integers(5, 500, 31)
    for each in (before, subject):
        each.start(len(tokens))
    for begin, end in ((0, 13), (13, 14), (14, 31)):
        wanted, found = (torch.from_numpy(each.feed(tokens[begin:end], unseen)) for each in (before, subject))
        if pass_ in CHANGING:
            assert 0 < float((found - wanted).norm() / wanted.norm()) < 0.2
        else:
            assert found.equal(wanted)
    if pass_ not in CHANGING:
        for name, state in before.states.items():
            assert state.view(torch.uint8).equal(subject.states[name].view(torch.uint8)), name


@pytest.mark.parametrize("pass_", PASSES)
def test_twice_is_once(pass_: ModuleType) -> None:
    """A pass finds nothing left to do in its own output; selection, which makes variants, is not asked again."""
    if pass_ is select_kernels:
        return
    once = alone(pass_, traced("case_02")[1])
    context = context_of(pass_)
    assert print_module(pass_.run(once, context)) == print_module(once)
