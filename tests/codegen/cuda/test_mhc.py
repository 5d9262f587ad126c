"""Residual boundaries: copies, widths and tiles that do not divide each other, hard values, rows by themselves."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.codegen.cuda.harness import Subject
from tests.codegen.sparse_harness import Operands, reference, rows_of, same
from v41c.ir.op import Op, seeded
from v41c.ir.ops.hc_coefficients import HcCoefficients
from v41c.ir.ops.mhc_boundary import MhcBoundary
from v41c.ir.ops.mhc_enter import MhcEnter
from v41c.targets.cuda import SM_90

#: bounds of tokens, one of each tiling: one token, four, sixteen and 64 to a tile
BOUNDS = (1, 16, 512, 4096)


def boundary(tokens: int, copies: int, width: int, dtype: str = "bf16", scale: float = 1.0) -> Operands:
    normal = seeded(100 + copies + width)
    outputs = (2 + copies) * copies
    return (
        normal(tokens, copies, width, scale=scale, dtype=dtype),
        normal(tokens, width, scale=scale, dtype=dtype),
        normal(tokens, copies).sigmoid(),
        normal(tokens, copies, copies).softmax(-1),
        normal(tokens, copies).sigmoid(),
        normal(outputs, copies * width, scale=(copies * width) ** -0.5),
        normal(3).abs() + 0.5,
        normal(outputs),
        normal(width, dtype=dtype),
    )


def entry(operands: Operands) -> Operands:
    return (operands[0], *operands[4:])


def close(ours: Tensor, theirs: Tensor) -> None:
    """A bf16 of the stream may round to its neighbour, 2^-7 away; the mix and the norm of such move by as much.

    A coefficient is a smooth function, of slope one at most, of a sum of n·d ≤ 1200 such values times weights of
    (n·d)^-1/2: few neighbours in it move it by far less than 2^-8.
    """
    if ours.dtype == torch.bfloat16:
        torch.testing.assert_close(ours, theirs, rtol=2.0**-6, atol=2.0**-8)
    else:
        torch.testing.assert_close(ours, theirs, rtol=2.0**-8, atol=2.0**-8)


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize(("copies", "width"), [(4, 40), (3, 33), (2, 288)])
def test_widths_and_copies(copies: int, width: int, bound: int) -> None:
    """Three copies leave a fourth column of every coefficient empty; 288 columns are several chunks."""
    operands = boundary(min(bound, 19), copies, width)
    op = MhcBoundary(1e-20, 1e-6, 20, "fp8_e8m0_32" if width % 32 == 0 else "none")
    for ours, theirs in zip(
        Subject.of(op, operands, SM_90, bound).call(operands), reference(op, operands), strict=True
    ):
        close(ours, theirs)


@pytest.mark.parametrize("bound", BOUNDS)
def test_the_width_of_a_release(bound: int) -> None:
    """160, 80, 40 and 20 chunks a tile; values of 2^40, whose squares an f32 still holds."""
    operands = boundary(min(bound, 2), 4, 5120, scale=2.0**40)
    op = MhcBoundary(1e-20, 1e-6, 20, "fp8_e8m0_32")
    results = Subject.of(op, operands, SM_90, bound).call(operands)
    updated, u, rounded, *coefficients = reference(op, operands)
    # neighbours, and what an f32 sum of five terms of 2^42 leaves where they cancel
    torch.testing.assert_close(results[0], updated, rtol=2.0**-7, atol=2.0**20)
    for ours, theirs in zip((results[1], *results[3:]), (u, *coefficients), strict=True):
        close(ours, theirs)
    # an fp8 value is one of 2^3 steps of its power of two
    torch.testing.assert_close(results[2], rounded, rtol=2.0**-3, atol=2.0**-8)


@pytest.mark.parametrize("bound", [16, 512])
def test_f32_streams(bound: int) -> None:
    """Sums of up to four products a value of the stream: a few units of 2^-24."""
    operands = boundary(7, 4, 40, "f32")
    op = MhcBoundary(1e-20, 1e-6, 20, "none")
    for ours, theirs in zip(
        Subject.of(op, operands, SM_90, bound).call(operands), reference(op, operands), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=2.0**-20, atol=2.0**-20)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the NaNs that are planted here
@pytest.mark.parametrize("bound", [16, 512])
@pytest.mark.parametrize("op", [MhcBoundary(1e-20, 1e-6, 20, "none"), MhcEnter(1e-20, 1e-6, 20, "none")])
def test_rows_do_not_depend_on_their_neighbours(op: Op, bound: int) -> None:
    """Not on how many there are, nor on NaNs and infinities in them."""
    whole = boundary(19 if bound == 512 else 7, 4, 160)
    operands = whole if op.name() == "mhc_boundary" else entry(whole)
    subject = Subject.of(op, operands, SM_90, bound)
    results = subject.call(operands)
    rows = [0, 3, 5]
    for part, result in zip(subject.call(rows_of(op, operands, rows)), results, strict=True):
        assert same(part, result[rows])
    hard = tuple(None if operand is None else operand.clone() for operand in operands)
    for operand in hard[: 2 if op.name() == "mhc_boundary" else 1]:
        if operand is not None:
            operand[1], operand[4] = float("nan"), float("inf")
    for spoilt, result in zip(subject.call(hard), results, strict=True):
        assert same(spoilt[rows], result[rows])
        assert not same(spoilt[1], result[1])


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("scale", [2.0**-40, 1.0, 2.0**40])
def test_coefficients_are_those_of_the_exact_product(scale: float, bound: int) -> None:
    """A weight of 24 significant bits: what two bf16 summands keep of it, 16 bits, is wrong by 2^-17.

    The product's error is that of an f32 sum, 2^-24 of its largest term several times over; sigmoids have slope 1/4.
    """
    operands = entry(boundary(min(bound, 5), 4, 96, scale=scale))
    stream, fn, gains, base = operands[0], operands[2], operands[3], operands[4]
    op = HcCoefficients(1e-20, 1e-6, 20)
    subject = Subject.of(op, (stream, fn, gains, base), SM_90, bound)
    pre, post, comb = subject.call((stream, fn, gains, base))
    assert stream is not None
    assert fn is not None
    assert gains is not None
    assert base is not None
    flat = stream.flatten(1).double()
    m = flat @ fn.double().T / (flat.square().mean(-1, keepdim=True) + 1e-20).sqrt()
    expected = torch.sigmoid(m[:, :4] * gains[0] + base[:4])
    torch.testing.assert_close(pre.double(), expected + 1e-6, rtol=0, atol=2.0**-21)
    doubled = 2 * torch.sigmoid(m[:, 4:8] * gains[1] + base[4:8])
    torch.testing.assert_close(post.double(), doubled, rtol=0, atol=2.0**-20)
    # columns end at one, but for eps; rows only nearly
    torch.testing.assert_close(comb.sum(1), torch.ones(comb.shape[0], 4), rtol=0, atol=2e-6)


def test_a_token_of_zeros() -> None:
    """Nothing is divided by zero: with eps the norm is zero, the coefficients those of the base."""
    operands = boundary(3, 4, 40)
    for operand in operands[:2]:
        if operand is not None:
            operand[1] = 0.0
    op = MhcBoundary(1e-20, 1e-6, 20, "none")
    results = Subject.of(op, operands, SM_90, 16).call(operands)
    for ours, theirs in zip(results, reference(op, operands), strict=True):
        close(ours, theirs)
    assert not results[1][1].any()
    assert math.isfinite(float(results[4].sum()))
