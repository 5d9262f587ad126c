"""Rules every CUDA kernel obeys, in Triton's interpreter, over every operation found in the folder: it agrees with the
reference on the examples, made for one token, few and many; it serves an empty step and leaves its counters at zero.

Integers, bytes and round trips are equal; floats are within the bounds of `close`.
"""

from __future__ import annotations

import pytest

from tests.codegen.cuda.harness import Subject
from tests.codegen.cuda.interpreter import run_blocks_backwards
from tests.codegen.sparse_harness import close, reference, rows_of, same
from v41c.codegen.cuda import has_kernel
from v41c.ir.ops import op_types
from v41c.targets.cuda import SM_90

NAMES = [name for name in sorted(op_types()) if has_kernel(name)]
#: operations whose rows say where they stand among all of the step's: some of them are no operands
WHOLE = ("engram_lookup_ordered",)


@pytest.mark.parametrize("tokens", SM_90.variants)
@pytest.mark.parametrize("name", NAMES)
def test_examples(name: str, tokens: int) -> None:
    for example in op_types()[name].examples():
        operands = rows_of(example.op, example.operands, slice(tokens))
        if name in WHOLE and example.operands[0] is not None and len(example.operands[0]) > tokens:
            continue
        subject = Subject.of(example.op, operands, SM_90, tokens)
        for ours, theirs in zip(subject.call(operands), reference(example.op, operands), strict=True):
            close(ours, theirs)


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_step(name: str) -> None:
    example = next(iter(op_types()[name].examples()))
    operands = rows_of(example.op, example.operands, slice(0))
    subject = Subject.of(example.op, operands, SM_90, 16)
    for ours, theirs in zip(subject.call(operands), reference(example.op, operands), strict=True):
        assert same(ours, theirs)


@pytest.mark.parametrize("name", NAMES)
def test_blocks_run_in_any_order(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit the same with the last block first: none writes where another does, nor adds to it as it comes."""
    *_, example = op_types()[name].examples()
    subject = Subject.of(example.op, example.operands, SM_90, 512)
    forwards = subject.call(example.operands)
    run_blocks_backwards(monkeypatch)
    for one, other in zip(forwards, subject.call(example.operands), strict=True):
        assert same(one, other)
