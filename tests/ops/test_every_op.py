"""Rules every operation obeys, over every operation found in the folder and each of its examples."""

from __future__ import annotations

import inspect

import pytest
import torch

from v41c.errors import VerifyError
from v41c.ir.build import Builder
from v41c.ir.interpret import interpret
from v41c.ir.op import Example, Op
from v41c.ir.ops import op_types
from v41c.ir.text import parse_module, print_graph
from v41c.ir.torch_types import torch_dtype, type_of

OPS = sorted(op_types().items())
EXAMPLES = [
    pytest.param(example, id=f"{name}-{index}") for name, op in OPS for index, example in enumerate(op.examples())
]


def types_of(example: Example) -> tuple:
    return tuple(None if operand is None else type_of(operand) for operand in example.operands)


@pytest.mark.parametrize("example", EXAMPLES)
def test_reference_returns_what_infer_says(example: Example) -> None:
    operands = tuple(None if o is None else o.clone() for o in example.operands)
    results = example.op.reference(*operands)
    results = results if isinstance(results, tuple) else (results,)
    expected = example.op.infer_results(types_of(example))
    assert [type_of(result) for result in results] == list(expected)
    for result in results:
        if result.dtype in (torch.float32, torch.bfloat16):
            assert torch.isfinite(result).all()


@pytest.mark.parametrize("example", EXAMPLES)
def test_reference_writes_only_its_states(example: Example) -> None:
    operands = tuple(None if o is None else o.clone() for o in example.operands)
    example.op.reference(*operands)
    for declared, before, after in zip(example.op.operands(), example.operands, operands, strict=True):
        if before is not None and not declared.state:
            assert torch.equal(before.view(torch.uint8), after.view(torch.uint8)), declared.name


@pytest.mark.parametrize("example", EXAMPLES)
def test_text_round_trips_and_interprets_to_the_reference(example: Example) -> None:
    builder = Builder("example")
    values = []
    for declared, operand in zip(example.op.operands(), example.operands, strict=True):
        if operand is None:
            values.append(None)
        elif declared.state or declared.name in ("window", "compressed", "keys", "history"):
            values.append(builder.state(declared.name, type_of(operand)))
        else:
            values.append(builder.input(declared.name, type_of(operand)))
    results = builder.apply(example.op, *values, module="layers.0")
    graph = builder.finish(*results[len(example.op.states) :])
    text = print_graph(graph)
    (again,) = parse_module(text)
    assert print_graph(again) == text
    given = {v.name: o.clone() for v, o in zip(values, example.operands, strict=True) if v is not None}
    run = interpret(again, given, lambda weight: given[weight.name], given)
    direct = example.op.reference(*(None if o is None else o.clone() for o in example.operands))
    direct = direct if isinstance(direct, tuple) else (direct,)
    found = [*list(run.states.values())[: len(example.op.states)], *run.outputs.values()]
    for left, right in zip(direct, found, strict=True):
        assert torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


@pytest.mark.parametrize("example", EXAMPLES)
def test_zero_tokens(example: Example) -> None:
    """An empty step is legal for every operation: operands whose first axis is the token axis shrink to nothing."""
    tokens = token_axis(example)
    operands = tuple(
        o[:0].clone() if o is not None and d.name in tokens else None if o is None else o.clone()
        for d, o in zip(example.op.operands(), example.operands, strict=True)
    )
    results = example.op.reference(*operands)
    results = results if isinstance(results, tuple) else (results,)
    assert all(result.shape[0] == 0 for result in results[len(example.op.states) :])


def token_axis(example: Example) -> set[str]:
    persistent = {"window", "cache", "partial", "history", "compressed", "keys", "table", "weight", "scale", "sink"}
    persistent |= {"fn", "base", "bias", "image_bias", "w1", "w2", "w3", "w1_scale", "w2_scale", "w3_scale"}
    persistent |= {"q_weight", "q_down", "kv_down", "q_scale", "kv_scale", "k_weight", "kv_weight", "embed", "head"}
    persistent |= {f"{name}_{i}" for name in ("weight", "scale") for i in (2, 3, 4)}
    persistent |= {f"shared_{name}" for name in ("w1", "w2", "w3", "w1_scale", "w2_scale", "w3_scale")}
    persistent |= {"start", "newline", "end"}
    if example.op.name() in ("gather_rows", "merge_patches"):
        persistent.add("x")
    return {declared.name for declared in example.op.operands() if declared.name not in persistent}


@pytest.mark.parametrize(("name", "op"), OPS)
def test_wrong_operand_count_is_refused(name: str, op: type[Op]) -> None:
    example = next(op.examples())
    with pytest.raises(VerifyError, match=rf"{name}: operands: expected \d+, got 0"):
        example.op.infer_results(())


@pytest.mark.parametrize(("name", "op"), OPS)
def test_wrong_rank_is_refused(name: str, op: type[Op]) -> None:
    example = next(op.examples())
    types = list(types_of(example))
    types[0] = type_of(torch.zeros(3, 3, 3, 3, 3, dtype=example.operands[0].dtype))
    if name == "round_trip":  # any rank, a whole number of groups
        with pytest.raises(VerifyError, match="last axis: expected a multiple of"):
            example.op.infer_results(tuple(types))
        return
    with pytest.raises(VerifyError, match=rf"{name}: .*expected .*, got "):
        example.op.infer_results(tuple(types))


@pytest.mark.parametrize("example", EXAMPLES)
def test_cost_is_positive_where_there_is_arithmetic(example: Example) -> None:
    types = types_of(example)
    assert example.op.flops(*types) >= 0
    declared = {operand.name: index for index, operand in enumerate(example.op.operands())}
    for name, size in example.op.touched(*types).items():
        assert size > 0 or does_not_read(example, declared[name])


def does_not_read(example: Example, index: int) -> bool:
    """Whether the results are the same when every byte of an operand is another."""
    spoiled = [None if o is None else o.clone() for o in example.operands]
    operand = spoiled[index]
    if operand is not None:
        operand.view(torch.uint8).bitwise_not_()
    results = [example.op.reference(*operands) for operands in (example.operands, spoiled)]
    wanted, found = (result if isinstance(result, tuple) else (result,) for result in results)
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(wanted, found, strict=True))


@pytest.mark.parametrize(("name", "op"), OPS)
def test_docstrings_say_formula_and_rounding(name: str, op: type[Op]) -> None:
    lines = (op.__doc__ or "").strip().splitlines()
    assert "=" in lines[0] or "→" in lines[0], f"{name}: the first line is the formula"
    assert len(lines) >= 3, f"{name}: the docstring says how it rounds or accumulates"
    assert (inspect.getmodule(op).__doc__ or "").endswith(".")


def test_torch_types_are_inverse() -> None:
    for example in (p.values[0] for p in EXAMPLES):
        for operand in example.operands:
            if operand is not None:
                assert torch_dtype(type_of(operand).dtype) == operand.dtype
