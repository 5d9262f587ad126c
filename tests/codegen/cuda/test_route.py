"""The choice of experts: ties, biases, numbers that are none, and a router in many tiles."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.codegen.cuda.harness import Subject
from tests.codegen.sparse_harness import reference, rows_of, same
from v41c.ir.op import seeded
from v41c.ir.ops.gate import Gate
from v41c.ir.ops.route import Route
from v41c.targets.cuda import SM_90

RELEASE = ("sqrtsoftplus", 1.5, 1.0, True)


def weights_close(ours: Tensor, theirs: Tensor) -> None:
    """Exponentials, logarithms and roots of Triton's interpreter and of PyTorch differ by a few units of 2^-24."""
    torch.testing.assert_close(ours, theirs, rtol=16 * 2.0**-24, atol=0.0)


def test_ties_go_to_the_lower_expert() -> None:
    logits = torch.zeros(3, 40)
    logits[1, 30:] = 1.0
    bias = torch.zeros(40)
    bias[::2] = -0.0
    op = Route(6, *RELEASE)
    operands = (logits, bias, None, None)
    ids, weights = Subject.of(op, operands, SM_90, 16).call(operands)
    expected, theirs = reference(op, operands)
    assert same(ids, expected)
    assert ids[0].tolist() == [0, 1, 2, 3, 4, 5]
    assert ids[1].tolist() == [30, 31, 32, 33, 34, 35]
    weights_close(weights, theirs)


def test_a_sum_of_zero_ties_with_a_sum_of_minus_zero() -> None:
    """Sigmoid of a very negative logit is 0; the sum with a bias of -0 is 0, with one below it is less."""
    logits, bias = torch.full((1, 5), -1e4), torch.tensor([-1.0, -0.0, 0.0, -0.0, -1.0])
    operands = (logits, bias, None, None)
    op = Route(2, "sigmoid", 1.0, 1.0, False)
    ids, _ = Subject.of(op, operands, SM_90, 1).call(operands)
    assert ids.tolist() == [[1, 2]]
    assert same(ids, reference(op, operands)[0])


@pytest.mark.parametrize("score", ["sqrtsoftplus", "sigmoid", "softmax"])
def test_large_logits_and_release_counts(score: str) -> None:
    """384 experts; logits up to ±60, where exponentials overflow or vanish unless they are taken of -|x|."""
    normal = seeded(3)
    logits, bias = normal(3, 384, scale=20.0), normal(384, scale=0.01)
    operands = (logits, bias, normal(384), torch.tensor([False, True, False]))
    op = Route(6, score, 1.5, 0.7, True)
    ids, weights = Subject.of(op, operands, SM_90, 16).call(operands)
    expected, theirs = reference(op, operands)
    assert same(ids, expected)
    torch.testing.assert_close(weights, theirs, rtol=64 * 2.0**-24, atol=2.0**-100)


def test_small_scores_keep_their_digits() -> None:
    """ln(1 + e^x) of x = -30: 1 + e^x rounds to 1, the score is e^-15."""
    logits = torch.tensor([[-30.0, -12.0, -5.0, 0.0]])
    operands = (logits, torch.zeros(4), None, None)
    op = Route(4, "sqrtsoftplus", 1.0, 1.0, False)
    _, weights = Subject.of(op, operands, SM_90, 1).call(operands)
    weights_close(weights, logits.double().exp().log1p().sqrt().float())


def test_experts_are_distinct_whatever_the_logits() -> None:
    nan, inf = float("nan"), float("inf")
    logits = torch.tensor([[nan, -inf, inf, 0.0, -inf, nan], [-inf] * 6])
    operands = (logits, torch.zeros(6), None, None)
    op = Route(3, *RELEASE)
    ids, _ = Subject.of(op, operands, SM_90, 16).call(operands)
    assert same(ids, reference(op, operands)[0])


@pytest.mark.parametrize("tokens", [1, 16, 512])
def test_a_router_in_tiles(tokens: int) -> None:
    """Exact logits - integers - so that experts must be equal; 70 experts and 1,100 columns are no whole tiles."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randint(-3, 4, (min(tokens, 37), 1100), generator=generator).bfloat16()
    weight = torch.randint(-2, 3, (70, 1100), generator=generator).bfloat16()
    operands = (x, weight, torch.randn(70, generator=generator), None, None)
    op = Gate(6, "sqrtsoftplus", 1.5, 64.0, True)
    subject = Subject.of(op, operands, SM_90, tokens)
    ids, weights = subject.call(operands)
    expected, theirs = reference(op, operands)
    assert same(ids, expected)
    weights_close(weights, theirs)
    if tokens > 1:
        rows = [11, 2, 7]
        part = subject.call(rows_of(op, operands, rows))
        assert same(part[0], ids[rows])
        assert same(part[1], weights[rows])
