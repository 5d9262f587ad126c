"""The fused residual operations against the kernels of their parts: equal to the last bit, at any number of tokens."""

from __future__ import annotations

import pytest
from torch import Tensor

from tests.codegen.sparse_harness import Operands, Subject, build, same
from v41c.ir.op import Op, seeded
from v41c.ir.ops.hc_coefficients import HcCoefficients
from v41c.ir.ops.hc_mix import HcMix
from v41c.ir.ops.hc_update import HcUpdate
from v41c.ir.ops.mhc_boundary import MhcBoundary
from v41c.ir.ops.mhc_enter import MhcEnter
from v41c.ir.ops.rms_norm import RmsNorm
from v41c.ir.ops.round_trip import RoundTrip
from v41c.targets import x86_64
from v41c.targets.target import CpuTarget

TARGETS = [target for target in x86_64.TARGETS if set(target.features) <= set(x86_64.host().features)]


def run(op: Op, operands: Operands, target: CpuTarget, tokens: int) -> tuple[Tensor, ...]:
    """The results of the operation's kernel, made for at most `tokens` tokens."""
    subject = Subject.of(op, operands, target, tokens)
    return subject.call(build([subject], target), operands)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
@pytest.mark.parametrize(("tokens", "width", "dtype"), [(1, 1024, "bf16"), (7, 160, "bf16"), (30, 96, "f32")])
def test_a_boundary_is_its_parts(tokens: int, width: int, dtype: str, target: CpuTarget) -> None:
    normal = seeded(tokens)
    copies, outputs = 4, 24
    format = "fp8_e8m0_32" if dtype == "bf16" else "none"
    op = MhcBoundary(1e-20, 1e-6, 20, format)
    stream, y = normal(tokens, copies, width, dtype=dtype), normal(tokens, width, dtype=dtype)
    post, comb = normal(tokens, copies).sigmoid(), normal(tokens, copies, copies).softmax(-1)
    pre = normal(tokens, copies).sigmoid()
    predictor = (normal(outputs, copies * width, scale=0.02), normal(3).abs() + 0.5, normal(outputs))
    weight = normal(width, dtype=dtype)

    (updated,) = run(HcUpdate(), (stream, y, post, comb), target, tokens)
    (mixed,) = run(HcMix(), (updated, pre), target, tokens)
    (u,) = run(RmsNorm(1e-20), (mixed, weight), target, tokens)
    entered = [u, *(run(RoundTrip(format), (u,), target, tokens) if format != "none" else ())]
    entered += run(HcCoefficients(1e-20, 1e-6, 20), (updated, *predictor), target, tokens)

    fused = run(op, (stream, y, post, comb, pre, *predictor, weight), target, tokens)
    assert all(same(ours, theirs) for ours, theirs in zip(fused, [updated, *entered], strict=True))
    enter = MhcEnter(1e-20, 1e-6, 20, format)
    alone = run(enter, (updated, pre, *predictor, weight), target, tokens)
    assert all(same(ours, theirs) for ours, theirs in zip(alone, entered, strict=True))
