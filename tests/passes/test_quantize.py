"""quantize: the graph is the trace of the same model stored in the release's formats, now and after every pass."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from tests.traced import CASES, FOLDERS, no_kernel, traced
from v41c.errors import ConfigError
from v41c.frontend.config import ModelConfig
from v41c.frontend.quantized_checkpoint import quantized_config, quantized_types
from v41c.frontend.tensor_names import TensorFormats
from v41c.frontend.trace import trace
from v41c.ir.graph import Module
from v41c.ir.text import print_module
from v41c.passes import quantize, select_kernels
from v41c.passes.context import PassContext
from v41c.passes.pipeline import PIPELINE

FP8 = TensorFormats("fp8", "fp8")


def context(config: ModelConfig, arithmetic: str = "release") -> PassContext:
    return PassContext(arithmetic, no_kernel, (1, 512), {}, quantized_types(config))  # type: ignore[arg-type]


def text(module: Module) -> str:
    """Without the passes that made the operations."""
    return re.sub(r"( // \S* \| )\S*", r"\1", print_module(module))


def stored_as(case: str, dtype: str, expert: str, formats: TensorFormats | None = None) -> tuple[ModelConfig, Module]:
    source, _ = traced(case)
    config = replace(source.config, dtype=dtype, expert_dtype=expert)
    return config, trace(config, formats or TensorFormats.of(config), source.engram_pad)


@pytest.mark.parametrize("case", CASES)
def test_the_graph_is_the_release_s_through_the_whole_pipeline(case: str) -> None:
    """And so is every graph after it: no round trip stands alone where the release's engine has it in its producer."""
    config, module = stored_as(case, "bf16", "bf16")
    wanted = stored_as(case, "fp8", "fp4")[1]
    given = context(config)
    found = quantize.run(module, given)
    found.verify()
    assert text(found) == text(wanted) != text(module)
    for pass_ in (entry for entry, _ in PIPELINE if entry is not quantize):
        if pass_ is select_kernels:
            break
        found, wanted = pass_.run(found, given), pass_.run(wanted, given)
        assert text(found) == text(wanted), pass_.NAME


@pytest.mark.parametrize(("dtype", "expert", "after"), [("fp8", "bf16", "fp4"), ("bf16", "fp4", "fp4")])
def test_the_bf16_part_of_a_mixed_checkpoint(dtype: str, expert: str, after: str) -> None:
    """An input that was rounded for the one is not rounded again for the other."""
    config, module = stored_as("case_02", dtype, expert)
    found = quantize.run(module, context(config))
    assert text(found) == text(stored_as("case_02", "fp8", after)[1]) != text(module)


@pytest.mark.parametrize("case", sorted(FOLDERS.keys() - {"case_02"}))
def test_what_is_quantised_is_returned_as_it_is(case: str) -> None:
    """tiny-v41 stores one projection as bf16, as an fp8 model may: it is in a release format already."""
    source, module = traced(case)
    assert quantize.run(module, context(source.config)) is module


def test_twice_is_the_same_object() -> None:
    source, module = traced("case_02")
    once = quantize.run(module, context(source.config))
    assert quantize.run(once, context(source.config)) is once


def test_exact_arithmetic_takes_the_quantised_weights_and_no_round_trips() -> None:
    """What quantised weights alone cost can then be told from what rounded activations cost."""
    config, module = stored_as("case_02", "bf16", "bf16")
    wanted = stored_as("case_02", "fp8", "fp4")[1]
    exact = context(config, "exact")
    (remove,) = (entry for entry, _ in PIPELINE if entry.NAME == "remove-quantization")
    assert text(remove.run(quantize.run(module, exact), exact)) == text(remove.run(wanted, exact))


def test_a_width_that_no_block_divides_is_refused() -> None:
    config = replace(traced("case_02")[0].config, moe_inter_dim=40)
    message = r"--passes \+quantize: moe_inter_dim = 40: expected a multiple of 32, the block of the quantised weights"
    with pytest.raises(ConfigError, match=message):
        quantized_config(config)
