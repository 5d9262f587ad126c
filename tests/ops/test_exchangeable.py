"""Operations that say that an order does not matter: proven on every example, for the reference and the CPU kernel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.codegen.sparse_harness import Subject, build, examples_without_packed, reference, same
from v41c.ir.op import Example, Op
from v41c.ir.ops import op_types
from v41c.ir.ops.index_topk import IndexTopk
from v41c.ir.ops.window_write import WindowWrite
from v41c.targets import x86_64

Group = tuple[tuple[str, int], ...]
DECLARED = {name: op for name, op in op_types().items() if op.exchangeable}


def exchanged(example: Example, group: Group) -> Iterator[Example]:
    """The example with every axis of the group in three other orders; none where it has no more than one element."""
    names = [declared.name for declared in example.op.operands()]
    axes = {names.index(name): axis for name, axis in group}
    sizes = {operand.shape[axis] for i, axis in axes.items() if (operand := example.operands[i]) is not None}
    assert len(sizes) == 1, f"{example.op.name()}: the axes of {group} have the sizes {sizes}"
    size = sizes.pop()
    generator = torch.Generator().manual_seed(size)
    for order in (torch.arange(size).flip(0), *(torch.randperm(size, generator=generator) for _ in range(2))):
        if size > 1:
            operands = (
                operand.index_select(axes[i], order) if i in axes and operand is not None else operand
                for i, operand in enumerate(example.operands)
            )
            yield replace(example, operands=tuple(operands))


def cases(op: type[Op]) -> Iterator[tuple[Example, Example]]:
    for example in op.examples():
        for group in op.exchangeable:
            for other in exchanged(example, group):
                yield example, other


def test_some_operations_are_declared() -> None:
    assert {"moe_experts", "moe_layer", "cache_write"} <= set(DECLARED)


@pytest.mark.parametrize("name", sorted(DECLARED))
def test_references_keep_every_bit(name: str) -> None:
    found = list(cases(DECLARED[name]))
    assert found, f"{name}: no example has an axis to exchange"
    for example, other in found:
        wanted, got = (reference(each.op, each.operands) for each in (example, other))
        assert all(same(a, b) for a, b in zip(wanted, got, strict=True))


@pytest.mark.parametrize("name", sorted(DECLARED))
def test_kernels_keep_every_bit(name: str) -> None:
    target = x86_64.host()
    examples = examples_without_packed(DECLARED[name])
    subjects = {id(e.op): Subject.of(e.op, e.operands, target, len(e.operands[1])) for e in examples}  # type: ignore[arg-type]
    library = build(subjects.values(), target)
    for example in examples:
        subject = subjects[id(example.op)]
        wanted = subject.call(library, example.operands)
        for group in example.op.exchangeable:
            for other in exchanged(example, group):
                got = subject.call(library, other.operands)
                assert all(same(a, b) for a, b in zip(wanted, got, strict=True))


@pytest.mark.parametrize(
    ("op", "group"),
    [
        # later tokens over earlier ones: their order is what is written
        (WindowWrite, (("kv", 0), ("positions", 0), ("slots", 0))),
        # a token's answer goes where the token stands
        (IndexTopk, (("q", 0), ("weights", 0), ("positions", 0), ("slots", 0))),
    ],
)
def test_the_proof_can_fail(op: type[Op], group: Group) -> None:
    assert group not in op.exchangeable
    moved = [
        not all(same(a, b) for a, b in zip(reference(op_, e.operands), reference(op_, o.operands), strict=True))
        for e in op.examples()
        for op_ in [e.op]
        for o in exchanged(e, group)
    ]
    assert any(moved)
