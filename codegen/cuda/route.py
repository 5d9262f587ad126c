"""Choice of experts: scores, the best by score plus bias in ascending order, their weights; one warp a token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import triton.language as tl

from v41c.codegen.cuda.frame import Arguments, Frame
from v41c.codegen.cuda.kernel import CudaKernel
from v41c.codegen.cuda.language import jit
from v41c.codegen.cuda.numeric import sigmoid
from v41c.codegen.cuda.rows import power_of_two

if TYPE_CHECKING:
    from v41c.ir.ops.gate import Gate
    from v41c.ir.ops.route import Route
    from v41c.ir.types import TensorType
    from v41c.targets.cuda import CudaTarget


def kernel(
    op: Route,
    operands: Sequence[TensorType | None],
    results: Sequence[TensorType],
    target: CudaTarget,
    bounds: Mapping[str, int],
) -> CudaKernel:
    """ids and weights [T, k] of logits [T, E]. 384 experts are 16 lanes of a thread, 12 of them in use."""
    frame = Frame(op, operands, results, bounds)
    tokens, experts = frame.type_of("logits").shape
    arguments = choice(frame, op, int(experts)) | {"logits": frame.operand("logits")}
    frame.launch(route_token, arguments, (frame.tiles(tokens),), warps=1)
    return frame.kernel()


def choice(frame: Frame, op: Route | Gate, experts: int) -> Arguments:
    """What `choose` takes besides logits and tokens."""
    named: Arguments = {name: frame.operand(name) for name in ("bias", "image_bias", "image")}
    named |= {"ids": frame.result(0), "weights": frame.result(1)}
    named |= {"EXPERTS": experts, "BE": power_of_two(experts), "CHOICES": op.experts}
    named |= {"SCORE": op.score, "SCALE": op.scale, "TEMPERATURE": op.temperature}
    return named | {"NORMALIZE": op.normalize and op.experts > 1}


@jit
def _log1p(u: tl.tensor) -> tl.tensor:
    """ln(1 + u) for u ≥ 0: what 1 + u rounds away is put back by the quotient (Kahan)."""
    above = 1.0 + u
    rounded = above - 1.0
    return tl.where(rounded == 0.0, u, tl.math.log(above) * (u / tl.where(rounded == 0.0, 1.0, rounded)))


@jit
def _score(logits: tl.tensor, inside: tl.tensor, SCORE: tl.constexpr, TEMPERATURE: tl.constexpr) -> tl.tensor:
    """Scores of logits [BT, BE]."""
    x = logits
    if TEMPERATURE != 1.0:
        x = tl.math.div_rn(x, tl.full(x.shape, TEMPERATURE, tl.float32))
    if SCORE == "sqrtsoftplus":
        # ln(1 + e^x) = max(x, 0) + ln(1 + e^-|x|)
        score = tl.math.sqrt_rn(tl.maximum(x, 0.0) + _log1p(tl.math.exp(-tl.abs(x))))
        score = tl.where(x != x, x, score)
    elif SCORE == "sigmoid":
        score = sigmoid(x)
    else:
        x = tl.where(inside, x, float("-inf"))
        above = tl.math.exp(x - tl.max(x, axis=1)[:, None])
        score = above / tl.sum(above, axis=1)[:, None]
    return score


@jit
def choose(
    logits: tl.tensor,
    t: tl.tensor,
    T: tl.tensor,
    bias: tl.tensor,
    image_bias: tl.tensor,
    image: tl.tensor,
    ids: tl.tensor,
    weights: tl.tensor,
    EXPERTS: tl.constexpr,
    BE: tl.constexpr,
    CHOICES: tl.constexpr,
    SCORE: tl.constexpr,
    SCALE: tl.constexpr,
    TEMPERATURE: tl.constexpr,
    NORMALIZE: tl.constexpr,
) -> None:
    """Experts and their weights from logits [BT, BE] of tokens t [BT].

    The order of (score + bias, lower expert first) is that of one integer: the bits of the sum, made to ascend, above
    the complement of the expert. NaN is the largest, as in a sort of PyTorch; no score is -0, so no sum is.
    """
    expert = tl.arange(0, BE)
    inside = expert < EXPERTS
    score = _score(logits, inside[None, :], SCORE, TEMPERATURE)
    added = tl.load(bias + expert, mask=inside, other=0.0)[None, :]
    if image is not None:
        seen = tl.load(image + t, mask=t < T, other=0) != 0
        added = tl.where(seen[:, None], tl.load(image_bias + expert, mask=inside, other=0.0)[None, :], added)
    biased = score + added
    bits = biased.to(tl.int32, bitcast=True)
    order = tl.where(biased != biased, 0x7FFFFFFF, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits))
    LOWEST: tl.constexpr = -(2**63)
    key = tl.where(inside[None, :], order.to(tl.int64) * 65536 + (65535 - expert)[None, :], LOWEST)
    chosen = key != key
    for _ in tl.static_range(CHOICES):
        best = key == tl.max(key, axis=1)[:, None]
        chosen = chosen | best
        key = tl.where(best, LOWEST, key)
    place = tl.cumsum(chosen.to(tl.int32), axis=1) - 1
    weight = score
    if NORMALIZE:
        weight = tl.math.div_rn(score, tl.sum(tl.where(chosen, score, 0.0), axis=1)[:, None] + 1e-20)
    offset = t[:, None] * CHOICES + place
    taken = chosen & (t[:, None] < T)
    tl.store(ids + offset, tl.broadcast_to(expert[None, :], chosen.shape), mask=taken)
    tl.store(weights + offset, weight * SCALE, mask=taken)


@jit
def route_token(
    logits: tl.tensor,
    bias: tl.tensor,
    image_bias: tl.tensor,
    image: tl.tensor,
    ids: tl.tensor,
    weights: tl.tensor,
    EXPERTS: tl.constexpr,
    BE: tl.constexpr,
    CHOICES: tl.constexpr,
    SCORE: tl.constexpr,
    SCALE: tl.constexpr,
    TEMPERATURE: tl.constexpr,
    NORMALIZE: tl.constexpr,
) -> None:
    """One token."""
    t = tl.program_id(0) + tl.arange(0, 1)
    expert = tl.arange(0, BE)[None, :]
    values = tl.load(logits + t[:, None] * EXPERTS + expert, mask=expert < EXPERTS, other=0.0)
    choose(
        *(values, t, tl.num_programs(0), bias, image_bias, image, ids, weights),
        *(EXPERTS, BE, CHOICES, SCORE, SCALE, TEMPERATURE, NORMALIZE),
    )
