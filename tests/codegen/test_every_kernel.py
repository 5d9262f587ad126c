"""Rules every CPU kernel obeys, over every operation found in the folder: it exists, agrees with the reference on the
examples, serves an empty step.

Sharper bounds, other shapes and bit equality stand in the files of each family of kernels.
"""

from __future__ import annotations

from functools import cache

import pytest

from tests.codegen.harness import Library
from tests.codegen.sparse_harness import (
    Subject,
    build,
    close,
    examples_without_packed,
    reference,
    rows_of,
    same,
    symbolic_types,
)
from v41c.codegen.cpu import has_kernel, kernel_for, needs_packed
from v41c.errors import UnsupportedError
from v41c.ir.op import Example
from v41c.ir.ops import op_types
from v41c.targets import x86_64

#: packed rows of activations are for targets that say so
NAMES = sorted(op_types().keys() - {"pack_rows"})


@cache
def built(name: str) -> tuple[Library, tuple[tuple[Example, Subject], ...]]:
    target = x86_64.host()
    pairs = [
        (example, Subject.of(example.op, example.operands, target, 40))
        for example in examples_without_packed(op_types()[name])
    ]
    return build((subject for _, subject in pairs), target), tuple(pairs)


@pytest.mark.parametrize("name", NAMES)
def test_there_is_a_kernel(name: str) -> None:
    assert op_types()[name].view or has_kernel(name)


@pytest.mark.parametrize("name", [name for name in NAMES if not op_types()[name].view])
def test_examples(name: str) -> None:
    library, pairs = built(name)
    for example, subject in pairs:
        results = zip(subject.call(library, example.operands), reference(example.op, example.operands), strict=True)
        for ours, theirs in results:
            close(ours, theirs)


@pytest.mark.parametrize("name", [name for name in NAMES if not op_types()[name].view])
def test_an_empty_step(name: str) -> None:
    library, pairs = built(name)
    example, subject = pairs[0]
    operands = rows_of(example.op, example.operands, slice(0))
    for ours, theirs in zip(subject.call(library, operands), reference(example.op, operands), strict=True):
        assert same(ours, theirs)


def test_packed_rows_of_activations_are_refused() -> None:
    """Never a kernel that takes bytes for floats."""
    target = x86_64.host()
    refused = set()
    for op in op_types().values():
        for example in op.examples():
            types, _ = symbolic_types(example.op, example.operands)
            if needs_packed(example.op, types):
                message = rf"{op.name()} on {target.name}: activations: expected bf16 or f32, got packed rows"
                with pytest.raises(UnsupportedError, match=message):
                    kernel_for(example.op, types, example.op.infer_results(types), target, {"T": 16})
                refused.add(op.name())
    products = {"linear", "linear_group", "latents", "moe_experts", "moe_layer"}
    assert refused == products | {"mhc_boundary", "mhc_enter", "latent_norms", "grouped_linear_quantized"}
    assert products == {name for name, op in op_types().items() if op.packable}
    assert not has_kernel("pack_rows")
