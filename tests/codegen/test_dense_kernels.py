"""Products, experts, norms and the residual stream on the CPU, against the operations' references.

A dot product of n terms in another order differs by at most n · 2^-24 · Σ|term|; its rounding to bf16 may then fall
to the neighbour, up to 2^-7 of the result. What only moves or rounds values is equal. And whatever the reference gives,
a token's bits must not depend on its company: variants, numbers of rows and of threads are compared bit for bit.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from tests.codegen.harness import Library
from tests.codegen.sparse_harness import (
    Operands,
    Subject,
    build,
    examples_without_packed,
    reference,
    rows_of,
    same,
)
from v41c.codegen.cpu import kernel_for
from v41c.errors import UnsupportedError
from v41c.ir import formats
from v41c.ir.op import Example, Op, seeded
from v41c.ir.ops import op_types
from v41c.ir.ops.grouped_linear import GroupedLinear
from v41c.ir.ops.hc_coefficients import HcCoefficients
from v41c.ir.ops.linear import Linear
from v41c.ir.ops.moe_experts import MoeExperts
from v41c.ir.ops.rms_norm import RmsNorm
from v41c.ir.ops.round_trip import RoundTrip
from v41c.ir.types import DType, TensorType
from v41c.targets import x86_64
from v41c.targets.target import CpuTarget

NAMES = (
    "add",
    "concat",
    "embedding",
    "gather_rows",
    "grouped_linear",
    "hc_coefficients",
    "hc_mix",
    "hc_update",
    "linear",
    "mhc_boundary",
    "mhc_enter",
    "moe_experts",
    "rms_norm",
    "round_trip",
    "start_stream",
    "stream_mean",
    "swiglu",
)
#: |kernel − reference| allowed on the examples' f32 results, whose magnitudes are about ten; bf16 adds a rounding
ABSOLUTE = {
    "grouped_linear": 96 * 2.0**-24 * 64,
    "hc_coefficients": 2e-6,  # the Sinkhorn tolerance of the golden units
    "hc_mix": 4 * 2.0**-24 * 8,
    "hc_update": 5 * 2.0**-24 * 8,
    "linear": 96 * 2.0**-24 * 64,
    "mhc_boundary": 2e-6,
    "mhc_enter": 2e-6,
    "moe_experts": 96 * 2.0**-24 * 64,
    "rms_norm": 40 * 2.0**-24 * 4,
    "stream_mean": 4 * 2.0**-24 * 4,
    "swiglu": 4 * 2.0**-24 * 64,
}
TARGETS = [target for target in x86_64.TARGETS if set(target.features) <= set(x86_64.host().features)]
#: rows around the sizes at which kernels change their ways: a few rows, register tiles, blocks of a task
ROWS = (0, 1, 2, 3, 4, 5, 8, 9, 12, 17, 50)


@pytest.fixture(params=TARGETS, ids=lambda target: target.name)
def target(request: pytest.FixtureRequest) -> CpuTarget:
    """Every target that this machine runs."""
    return request.param  # type: ignore[no-any-return]


@cache
def examples(name: str) -> tuple[Example, ...]:
    return examples_without_packed(op_types()[name])


@cache
def built(name: str, target: CpuTarget) -> tuple[Library, tuple[tuple[Subject, Subject], ...]]:
    """Kernels for every example of an operation, made for many tokens and for one."""
    variants = [
        (
            Subject.of(example.op, example.operands, target, 20),
            Subject.of(example.op, example.operands, target, 1),
        )
        for example in examples(name)
    ]
    return build((subject for row in variants for subject in row), target), tuple(variants)


def close(name: str, got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for ours, theirs in zip(got, expected, strict=True):
        if name in ABSOLUTE:
            relative = 2.0**-7 if ours.dtype == torch.bfloat16 else 0.0
            torch.testing.assert_close(ours, theirs, rtol=relative, atol=ABSOLUTE[name])
        else:
            assert same(ours, theirs)


@pytest.mark.parametrize("name", NAMES)
def test_examples(name: str, target: CpuTarget) -> None:
    library, variants = built(name, target)
    for example, (many, single) in zip(examples(name), variants, strict=True):
        got = many.call(library, example.operands)
        close(name, got, reference(example.op, example.operands))
        if name in ("concat", "gather_rows"):
            continue  # other sizes than that of tokens
        for row in range(got[0].shape[0]):
            alone = single.call(library, rows_of(example.op, example.operands, [row]))
            assert all(same(left, right[row : row + 1]) for left, right in zip(alone, got, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_no_tokens(name: str, target: CpuTarget) -> None:
    library, variants = built(name, target)
    example = examples(name)[0]
    operands = rows_of(example.op, example.operands, slice(0))
    for subject in variants[0]:
        for ours, theirs in zip(subject.call(library, operands), reference(example.op, operands), strict=True):
            assert same(ours, theirs)


# ---- products --------------------------------------------------------------------------------------------------------


def fp8_weight(rows: int, columns: int, seed: int) -> tuple[Tensor, Tensor]:
    """Every finite e4m3 code, scales 2^-9 … 2^-5 of blocks of 32 x 32."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, columns), generator=generator, dtype=torch.uint8)
    codes = torch.where((codes & 0x7F) == 0x7F, codes - 1, codes)
    scales = torch.randint(118, 123, (-(-rows // 32), columns // 32), generator=generator, dtype=torch.uint8)
    return codes.view(torch.float8_e4m3fn), scales.view(torch.float8_e8m0fnu)


def linear_case(kind: str, rows: int, columns: int, out: str) -> tuple[Op, Operands]:
    normal = seeded(rows + columns)
    x = normal(max(ROWS), columns, dtype="f32" if kind == "f32" else "bf16")
    if kind == "f8e4m3":
        return Linear(out), (formats.round_trip(x, "fp8_e8m0_32"), *fp8_weight(rows, columns, rows))
    return Linear(out), (x, normal(rows, columns, dtype=kind), None)


LINEAR_CASES = [
    ("f8e4m3", 80, 96, "f32"),
    ("f8e4m3", 33, 320, "bf16"),
    ("f8e4m3", 272, 1056, "bf16"),
    ("bf16", 1, 1, "f32"),
    ("bf16", 19, 50, "f32"),
    ("bf16", 40, 529, "bf16"),
    ("f32", 200, 257, "f32"),
]


@pytest.fixture(scope="module")
def linears() -> dict[CpuTarget, tuple[Library, list[tuple[Subject, Subject]]]]:
    """Kernels of all linear cases, by target: for chunks and for single tokens."""
    made = {}
    for target in TARGETS:
        subjects = []
        for case in LINEAR_CASES:
            op, operands = linear_case(*case)
            subjects.append((Subject.of(op, operands, target, max(ROWS)), Subject.of(op, operands, target, 1)))
        made[target] = build((subject for pair in subjects for subject in pair), target), subjects
    return made


@pytest.mark.parametrize("index", range(len(LINEAR_CASES)), ids=lambda index: "-".join(map(str, LINEAR_CASES[index])))
def test_linear_is_close_and_its_bits_are_its_own(
    index: int, target: CpuTarget, linears: dict[CpuTarget, tuple[Library, list[tuple[Subject, Subject]]]]
) -> None:
    library, subjects = linears[target]
    many, single = subjects[index]
    op, operands = linear_case(*LINEAR_CASES[index])
    (whole,) = many.call(library, operands)
    (expected,) = reference(op, operands)
    x, weight, scale = operands
    assert x is not None
    assert weight is not None
    magnitude = x.float().abs() @ formats.dequantize(weight, scale).abs().T
    allowed = x.shape[1] * 2.0**-24 * magnitude
    if op.attributes()["out"] == "bf16":
        allowed = allowed + 2.0**-7 * expected.float().abs()
    assert ((whole.float() - expected.float()).abs() <= allowed).all()
    for rows in ROWS:
        (part,) = many.call(library, rows_of(op, operands, slice(rows)))
        assert same(part, whole[:rows])
    for row in (0, 7, 49):
        (alone,) = single.call(library, rows_of(op, operands, [row]))
        assert same(alone, whole[row : row + 1])


def test_linear_rows_do_not_meet(
    target: CpuTarget, linears: dict[CpuTarget, tuple[Library, list[tuple[Subject, Subject]]]]
) -> None:
    library, subjects = linears[target]
    _, operands = linear_case(*LINEAR_CASES[2])
    (whole,) = subjects[2][0].call(library, operands)
    assert operands[0] is not None
    x = operands[0].clone()
    x[5:9] = torch.nan
    x[20] = torch.inf
    (got,) = subjects[2][0].call(library, (x, *operands[1:]))
    untouched = [row for row in range(max(ROWS)) if row not in (5, 6, 7, 8, 20)]
    assert same(got[untouched], whole[untouched])
    assert got[5:9].isnan().all()


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_linear_bits_do_not_depend_on_threads(
    threads: int, target: CpuTarget, linears: dict[CpuTarget, tuple[Library, list[tuple[Subject, Subject]]]]
) -> None:
    library, subjects = linears[target]
    op, operands = linear_case(*LINEAR_CASES[2])
    (whole,) = subjects[2][0].call(library, operands)
    assert library.handle.v41c_set_threads(threads) == threads
    for subject, rows in ((subjects[2][0], max(ROWS)), (subjects[2][0], 3), (subjects[2][1], 1)):
        (part,) = subject.call(library, rows_of(op, operands, slice(rows)))
        assert same(part, whole[:rows])
    library.handle.v41c_set_threads(0)


def test_every_fp8_weight_is_decoded_exactly(target: CpuTarget) -> None:
    # one-hot inputs read the weight itself; scales of the whole exact range, 2^-57 … 2^67
    weight, _ = fp8_weight(64, 128, 1)
    scales = torch.tensor([[70, 71, 90, 110], [126, 127, 140, 194]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    x = torch.eye(128, dtype=torch.bfloat16)
    for tokens in (1, 128):
        subject = Subject.of(Linear("f32"), (x, weight, scales), target, tokens)
        library = build([subject], target)
        steps = range(128) if tokens == 1 else [slice(128)]
        rows = [subject.call(library, (x[[s]] if tokens == 1 else x, weight, scales))[0] for s in steps]
        assert torch.equal(torch.cat(rows), formats.dequantize(weight, scales).T)


def test_grouped_linear_of_odd_groups(target: CpuTarget) -> None:
    normal = seeded(3)
    for tokens, groups, rows, columns in ((20, 3, 20, 40), (13, 8, 32, 64)):
        operands = (normal(tokens, groups, columns, dtype="bf16"), normal(groups * rows, columns, dtype="bf16"), None)
        many, single = (Subject.of(GroupedLinear(), operands, target, bound) for bound in (tokens, 1))
        library = build([many, single], target)
        (whole,) = many.call(library, operands)
        expected = reference(GroupedLinear(), operands)[0]
        torch.testing.assert_close(whole, expected, rtol=2.0**-7, atol=columns * 2.0**-24 * 64)
        for row in (0, tokens - 1):
            assert same(single.call(library, rows_of(GroupedLinear(), operands, [row]))[0], whole[row : row + 1])


def test_product_refuses_what_its_layout_cannot_hold(target: CpuTarget) -> None:
    kinds = (
        TensorType(DType.BF16, ("T", 48)),
        TensorType(DType.F8E4M3, (64, 48)),
        TensorType(DType.E8M0, (2, 2)),
    )
    with pytest.raises(UnsupportedError, match=r"linear on cpu:.*fp8 weight: expected K .*multiples of 32, got.*K 48"):
        kernel_for(Linear("bf16"), kinds, (TensorType(DType.BF16, ("T", 64)),), target, {"T": 1})


# ---- experts ---------------------------------------------------------------------------------------------------------


def experts_case(
    kind: str, tokens: int, experts: int, chosen: int, width: int, inner: int
) -> tuple[MoeExperts, Operands]:
    """Weights of about unit gain; expert 0 is everyone's and the last is nobody's if there is a choice."""
    normal = seeded(experts * width + inner)
    stacks: list[Tensor] = []
    scales: list[Tensor | None] = []
    for rows, columns in ((inner, width), (inner, width), (width, inner)):
        values = normal(experts, rows, columns)
        if kind == "f4e2m1":
            stacks.append(formats.pack_nibbles(formats.encode_e2m1(values * 2)).view(torch.int8))
            codes = (normal(experts, rows, columns // 32) + 122).to(torch.uint8)
        elif kind == "f8e4m3":
            stacks.append((values * 60).to(torch.float8_e4m3fn))
            codes = (normal(experts, -(-rows // 32), columns // 32) + 117).to(torch.uint8)
        else:
            stacks.append((values * columns**-0.5).to(torch.bfloat16 if kind == "bf16" else torch.float32))
        scales.append(codes.view(torch.float8_e8m0fnu) if kind.startswith("f4") or kind.startswith("f8") else None)
    preference = normal(tokens, experts)
    preference[:, 0] -= 10
    preference[:, -1] += 10 if experts > chosen else 0
    ids = preference.argsort(1)[:, :chosen].sort(1).values.int()
    x = normal(tokens, width, dtype="f32" if kind == "f32" else "bf16")
    name = "none" if scales[0] is None else "fp8_e8m0_32"
    x = x if name == "none" else formats.round_trip(x, name)
    return MoeExperts(2.0, name), (x, ids, normal(tokens, chosen).sigmoid(), *stacks, *scales)


@pytest.mark.parametrize(
    "case",
    [
        ("f4e2m1", 60, 3, 2, 96, 64),
        ("f4e2m1", 30, 40, 3, 64, 160),
        ("f8e4m3", 30, 4, 1, 64, 96),
        ("bf16", 30, 2, 2, 33, 50),
    ],
    ids=lambda case: "-".join(map(str, case)),
)
def test_experts_are_close_and_their_bits_are_their_own(
    case: tuple[str, int, int, int, int, int], target: CpuTarget
) -> None:
    op, operands = experts_case(*case)
    tokens = case[1]
    many, single = Subject.of(op, operands, target, tokens), Subject.of(op, operands, target, 1)
    library = build([many, single], target)
    (whole,) = many.call(library, operands)
    (expected,) = reference(op, operands)
    # a bf16 rounding of gate, up or activation may fall the other way, and once more through the fp8 round trip: at
    # most a few of a row's terms; measured 3e-3 of the norm, a wrong expert or weight is about 1
    assert (whole - expected).norm() <= 1e-2 * expected.norm()
    for rows in (0, 1, 2, 3, 9, 17):
        (part,) = many.call(library, rows_of(op, operands, slice(rows)))
        assert same(part, whole[:rows])
    for row in (0, 11, 29):
        (alone,) = single.call(library, rows_of(op, operands, [row]))
        assert same(alone, whole[row : row + 1])
    library.handle.v41c_set_threads(1)
    assert same(many.call(library, operands)[0], whole)


def test_every_fp4_weight_is_decoded_exactly(target: CpuTarget) -> None:
    # gate and up one-hot and clamped to 1, so that the output of token i is silu(1) · w2[:, i]
    op = MoeExperts(1.0, "none")
    codes = torch.arange(64 * 32, dtype=torch.int64).view(1, 64, 32) * 7 % 16
    w2 = formats.pack_nibbles(codes.to(torch.uint8)).view(torch.int8)
    w2_scale = (torch.arange(64).view(1, 64, 1) + 96).to(torch.uint8).view(torch.float8_e8m0fnu)
    unit = torch.zeros(1, 32, 64)
    unit[0, :, :32] = torch.eye(32)
    one = formats.pack_nibbles(formats.encode_e2m1(unit)).view(torch.int8)
    scale = torch.full((1, 32, 2), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    x = torch.zeros(32, 64)
    x[:, :32] = 4 * torch.eye(32)
    ids, gains = torch.zeros(32, 1, dtype=torch.int32), torch.ones(32, 1)
    operands = (x, ids, gains, one, one, w2, scale, scale, w2_scale)
    subject = Subject.of(op, operands, target, 32)
    (got,) = subject.call(build([subject], target), operands)
    weight = formats.dequantize(w2[0], w2_scale[0])
    factor = got[14, 0] / weight[0, 14]  # a power of two
    assert float(factor) == pytest.approx(0.7310586, rel=1e-6)
    assert torch.equal(got, (factor * weight).T)


# ---- the rest --------------------------------------------------------------------------------------------------------


def test_mixing_ends_on_columns(target: CpuTarget) -> None:
    normal = seeded(4)
    op = HcCoefficients(1e-20, 1e-6, 20)
    operands = (normal(30, 4, 64, dtype="bf16"), normal(24, 256) * 0.3, normal(3).abs() + 0.5, normal(24))
    subject = Subject.of(op, operands, target, 30)
    library = build([subject], target)
    got = subject.call(library, operands)
    close("hc_coefficients", got, reference(op, operands))
    assert float((got[2].sum(-2) - 1).abs().max()) < 1e-5
    assert float((got[2].sum(-1) - 1).abs().max()) > 1e-3
    for rows in (1, 3, 9):
        part = subject.call(library, rows_of(op, operands, slice(rows)))
        assert all(same(left, right[:rows]) for left, right in zip(part, got, strict=True))


@pytest.mark.parametrize("copies", [1, 2, 3])
def test_mixing_of_any_number_of_copies(copies: int, target: CpuTarget) -> None:
    normal = seeded(copies)
    outputs = (2 + copies) * copies
    op = HcCoefficients(1e-20, 1e-6, 5)
    operands = (
        normal(3, copies, 33, dtype="bf16"),
        normal(outputs, copies * 33) * 0.2,
        normal(3).abs() + 0.5,
        normal(outputs),
    )
    subject = Subject.of(op, operands, target, 3)
    close("hc_coefficients", subject.call(build([subject], target), operands), reference(op, operands))


@pytest.mark.parametrize("name", list(formats.FORMATS))
def test_round_trip_of_extremes(name: str, target: CpuTarget) -> None:
    # every power of two and its neighbours as the maximum of a group; zeros, both signs, tiny and huge values
    powers = torch.exp2(torch.arange(-126.0, 127.0)).view(-1, 1)
    steps = torch.tensor([1.0, 1.0078125, 1.75, 1.7578125, 1.5, 1.9921875])
    largest = (powers * steps).flatten().bfloat16().float()
    x = torch.linspace(-1, 1, 96).expand(len(largest), 96) * largest.view(-1, 1)
    x = torch.cat((x, torch.zeros(2, 96), -torch.zeros(2, 96))).bfloat16()
    subject = Subject.of(RoundTrip(name), (x,), target, len(x))
    (got,) = subject.call(build([subject], target), (x,))
    assert torch.equal(got, reference(RoundTrip(name), (x,))[0])


def test_norm_of_extremes(target: CpuTarget) -> None:
    normal = seeded(1)
    x = normal(6, 77) * torch.tensor([1e-12, 1e-3, 1.0, 1e3, 1e12, 0.0]).view(-1, 1)
    for kind in (torch.float32, torch.bfloat16):
        operands = (x.to(kind), normal(77).to(kind))
        subject = Subject.of(RmsNorm(1e-20), operands, target, 6)
        (got,) = subject.call(build([subject], target), operands)
        relative = 2.0**-7 if kind == torch.bfloat16 else 77 * 2.0**-24
        torch.testing.assert_close(got, reference(RmsNorm(1e-20), operands)[0], rtol=relative, atol=0.0)
