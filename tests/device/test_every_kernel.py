"""Rules every CUDA kernel obeys, on a GPU, over every operation: it agrees with the reference on the examples, made for
one token, few and many, twice to the bit; it serves an empty step; a token's results do not depend on later tokens, nor
on any others unless the operation says so. Nothing is written outside of results, states and workspace.

Tolerances as in Triton's interpreter, those of `close`; functions like exp are a GPU's own, of errors below those.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch import Tensor

from tests.codegen.cuda.harness import Subject
from tests.codegen.sparse_harness import Operands, close, reference, rows_of, same
from tests.device.gpu import Gpu
from tools.gpu_launch import compile_ahead, compiled
from v41c.codegen.cuda import has_kernel
from v41c.ir.op import Example, Op
from v41c.ir.ops import op_types
from v41c.runtime.cuda_driver import CudaDriver
from v41c.targets.cuda import SM_90, CudaTarget

NAMES = [name for name in sorted(op_types()) if has_kernel(name)]
FEW = 16
#: operations whose rows say where they stand among all of the step's: some of them are no operands
WHOLE = ("engram_lookup_ordered",)
#: operations of a whole step: sorted rows, and drafts, each of which sees the whole block
OF_ALL = ("sort_rows", *WHOLE)
#: operands that tell the tokens of a step apart by sequence, so that some see others
SEQUENCES = {"slots", "starts", "first"}


@pytest.fixture(scope="module")
def gpu(driver: CudaDriver, target: CudaTarget) -> Gpu:
    """The GPU; the code of every test of this file is compiled first, many functions at a time."""
    compile_ahead([[subject.kernel for subject in subjects(name, target)] for name in NAMES], target)
    return Gpu(driver, lambda kernel: compiled([kernel], target))


def subjects(name: str, target: CudaTarget) -> Iterator[Subject]:
    """Whatever this file runs of an operation."""
    for tokens in target.variants:
        yield from (Subject.of(op, operands, target, tokens) for op, operands in cases(name, tokens))
    yield Subject.of(*cut(first_example(name), slice(0)), target, FEW)


def cases(name: str, tokens: int) -> Iterator[tuple[Op, Operands]]:
    """The examples of an operation, of at most so many tokens."""
    for example in op_types()[name].examples():
        if name not in WHOLE or example.operands[0] is None or len(example.operands[0]) <= tokens:
            yield cut(example, slice(tokens))


def cut(example: Example, rows: slice) -> tuple[Op, Operands]:
    return example.op, rows_of(example.op, example.operands, rows)


def first_example(name: str) -> Example:
    return next(iter(op_types()[name].examples()))


@pytest.mark.parametrize("tokens", SM_90.variants)
@pytest.mark.parametrize("name", NAMES)
def test_examples(name: str, tokens: int, gpu: Gpu, target: CudaTarget) -> None:
    for op, operands in cases(name, tokens):
        subject = Subject.of(op, operands, target, tokens)
        found, again = gpu.call(subject, operands), gpu.call(subject, operands)
        for ours, repeated, theirs in zip(found, again, reference(op, operands), strict=True):
            close(ours, theirs)
            assert same(ours, repeated)


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_step(name: str, gpu: Gpu, target: CudaTarget) -> None:
    op, operands = cut(first_example(name), slice(0))
    found = gpu.call(Subject.of(op, operands, target, FEW), operands)
    for ours, theirs in zip(found, reference(op, operands), strict=True):
        assert same(ours, theirs)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in OF_ALL])
def test_rows_do_not_depend_on_their_neighbours(name: str, gpu: Gpu, target: CudaTarget) -> None:
    for op, operands in cases(name, FEW):
        check_rows(gpu, Subject.of(op, operands, target, FEW), operands)


def check_rows(gpu: Gpu, subject: Subject, operands: Operands) -> None:
    """Rows of parts of a step have the bits that they have in the whole of it."""
    op = subject.op
    whole = rows(subject, gpu.call(subject, operands))
    count = min((len(result) for result in whole), default=0)
    parts = [slice(0, count - count // 2)]
    if not SEQUENCES & {declared.name for declared in op.operands()}:
        parts.append(slice(count - 1, count))
    if op.attributes().get("causal", True) and count > 1:
        for part in parts:
            found = rows(subject, gpu.call(subject, rows_of(op, operands, part)))
            assert all(same(ours, theirs[part]) for ours, theirs in zip(found, whole, strict=True))


def rows(subject: Subject, results: tuple[Tensor, ...]) -> list[Tensor]:
    """The results that have a row for every token."""
    kinds = subject.op.infer_results(subject.types)
    return [result for result, kind in zip(results, kinds, strict=True) if kind.shape[:1] == ("T",)]
