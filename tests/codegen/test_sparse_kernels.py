"""Kernels that move, choose and attend to cached rows, against the operations' references.

Tolerances. f32 sums of n terms in another order differ by at most n · 2^-24 · Σ|term|; a bf16 result may then round to
the neighbour, 2^-8 of its magnitude. Integers, packed bytes and copies are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.codegen.harness import Library
from tests.codegen.sparse_harness import Operands, Subject, build, exact_index, reference, rows_of, same
from v41c.ir import formats
from v41c.ir.op import Example, Op, seeded
from v41c.ir.ops import op_types
from v41c.ir.ops.attention import Attention
from v41c.ir.ops.cache_write import CacheWrite
from v41c.ir.ops.candidate_blocks import CandidateBlocks
from v41c.ir.ops.compress_pool import CompressPool
from v41c.ir.ops.engram_hash import EngramHash
from v41c.ir.ops.engram_lookup import EngramLookup
from v41c.ir.ops.index_candidates import IndexCandidates
from v41c.ir.ops.index_topk import IndexTopk
from v41c.ir.ops.index_topk_blocks import IndexTopkBlocks
from v41c.ir.ops.markov_chain import MarkovChain
from v41c.ir.ops.rope_table import RopeTable
from v41c.ir.ops.route import Route
from v41c.ir.ops.window_write import WindowWrite
from v41c.targets import x86_64
from v41c.targets.target import CpuTarget

NAMES = (
    "attention",
    "cache_write",
    "candidate_blocks",
    "compress_pool",
    "compress_tokens",
    "engram_gate",
    "engram_hash",
    "engram_lookup",
    "history_write",
    "image_mask",
    "index_candidates",
    "index_topk",
    "index_topk_blocks",
    "markov_chain",
    "reshape",
    "rope",
    "rope_table",
    "route",
    "run_starts",
    "window_write",
)
#: operations on single tokens without a state
PER_TOKEN = ("engram_gate", "engram_lookup", "rope", "rope_table", "route")
#: |kernel − reference| allowed on the examples' f32 results, whose magnitudes are about one; bf16 adds a rounding
ABSOLUTE = {
    "attention": 64 * 2.0**-24 * 4,
    "compress_pool": 4 * 2.0**-24 * 4,
    "engram_gate": 40 * 2.0**-24 * 4,
    "markov_chain": 24 * 2.0**-24 * 16,
    "rope_table": 2e-7,  # one unit in the last place of torch's, one rounding of ours
    "route": 24 * 2.0**-24 * 4,
}
TARGETS = [target for target in x86_64.TARGETS if set(target.features) <= set(x86_64.host().features)]


@pytest.fixture(params=TARGETS, ids=lambda target: target.name)
def target(request: pytest.FixtureRequest) -> CpuTarget:
    """Every target that this machine runs."""
    return request.param  # type: ignore[no-any-return]


@cache
def examples(name: str) -> tuple[Example, ...]:
    return tuple(op_types()[name].examples())


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def token_count(example: Example) -> int:
    names = [declared.name for declared in example.op.operands()]
    known = next(name for name in ("positions", "tokens", "logits", "rows", "stream", "x", "q") if name in names)
    operand = example.operands[names.index(known)]
    assert operand is not None
    return int(operand.shape[0])


@cache
def built(name: str, target: CpuTarget) -> tuple[Library, tuple[tuple[Subject, ...], ...]]:
    """Kernels for every example of an operation: for many tokens and, last, for one where a test uses it."""
    variants = [
        tuple(
            Subject.of(example.op, example.operands, target, tokens)
            for tokens in ((20, 1) if token_count(example) == 1 or name in PER_TOKEN else (20,))
        )
        for example in examples(name)
    ]
    return build((subject for row in variants for subject in row), target), tuple(variants)


def check(name: str, got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.dtype == theirs.dtype
        if ours.dtype in (torch.float32, torch.bfloat16) and name in ABSOLUTE:
            relative = 2.0**-8 if ours.dtype == torch.bfloat16 else 0.0
            torch.testing.assert_close(ours, theirs, rtol=relative, atol=ABSOLUTE[name])
        else:
            assert same(ours, theirs)


@pytest.mark.parametrize("name", NAMES)
def test_examples(name: str, target: CpuTarget) -> None:
    library, variants = built(name, target)
    for example, subjects in zip(examples(name), variants, strict=True):
        expected = reference(example.op, example.operands)
        for subject in subjects if token_count(example) == 1 else subjects[:1]:
            check(name, subject.call(library, example.operands), expected)


@pytest.mark.parametrize("name", NAMES)
def test_no_tokens(name: str, target: CpuTarget) -> None:
    library, variants = built(name, target)
    example = examples(name)[0]
    operands = rows_of(example.op, example.operands, slice(0))
    for subject in variants[0]:
        results = subject.call(library, operands)
        names = [declared.name for declared in example.op.operands()]
        for state, result in zip(example.op.states, results, strict=False):
            before = operands[names.index(state)]
            assert before is not None
            assert same(before, result)


# ---- attention -------------------------------------------------------------------------------------------------------


class Sequence:
    """One sequence's inputs to attention, its states poisoned wherever nothing was written."""

    def __init__(self, tokens: int, heads: int, width: int, window: int, topk: int, dtype: torch.dtype) -> None:
        normal = seeded(tokens + heads + width)
        self.packed = dtype == torch.bfloat16
        self.q = normal(tokens, heads, width).to(dtype)
        self.kv = formats.round_trip(normal(tokens, width).to(dtype), "fp8_e8m0_32")
        self.sink = normal(heads)
        rows = formats.pack(normal(tokens, width), "fp4_e4m3_16") if self.packed else normal(tokens, width)
        self.window = self._poison(2, window, width + width // 32 if self.packed else width)
        self.compressed = self._poison(2, tokens + 3, rows.shape[1])
        self.compressed[1, :tokens] = rows
        self.op = Attention(width**-0.5, True)
        self.selection = None
        if topk:
            # row j is visible from position j on
            ranked = [normal(position + 1).argsort()[:topk].sort().values.int() for position in range(tokens)]
            filled = [torch.cat((row, torch.full((topk - len(row),), -1, dtype=torch.int32))) for row in ranked]
            self.selection = torch.stack(filled)

    def _poison(self, *shape: int) -> Tensor:
        if self.packed:
            return torch.full(shape, 0xFF, dtype=torch.uint8)
        return torch.full(shape, torch.nan)

    def operands(self, begin: int, end: int, window: Tensor) -> Operands:
        """Operands of a step with these positions."""
        count = end - begin
        return (
            self.q[begin:end],
            self.kv[begin:end],
            self.sink,
            window,
            torch.arange(begin, end, dtype=torch.int32),
            torch.ones(count, dtype=torch.int32),
            torch.zeros(count, dtype=torch.int32),
            torch.zeros(count, dtype=torch.int32),
            None if self.selection is None else self.compressed,
            None if self.selection is None else self.selection[begin:end],
        )

    def run(self, library: Library, subjects: dict[int, tuple[Subject, Subject]], cuts: list[int]) -> Tensor:
        """Attention and window write, step by step; `subjects` by the largest step."""
        window, results = self.window.clone(), []
        for begin, end in zip([0, *cuts], [*cuts, self.q.shape[0]], strict=True):
            attend, write = subjects[1 if end - begin == 1 else 20]
            operands = self.operands(begin, end, window)
            results.append(attend.call(library, operands)[0])
            (window,) = write.call(library, (window, operands[1], operands[4], operands[5]))
        return torch.cat(results)


@pytest.mark.parametrize(
    ("heads", "width", "window", "topk", "dtype"),
    [
        (3, 96, 8, 0, torch.bfloat16),
        (17, 32, 8, 6, torch.bfloat16),
        (4, 64, 70, 5, torch.bfloat16),
        (5, 64, 8, 6, torch.float32),
        (33, 128, 4, 130, torch.bfloat16),
    ],
)
def test_attention_of_any_cut(
    heads: int, width: int, window: int, topk: int, dtype: torch.dtype, target: CpuTarget
) -> None:
    sequence = Sequence(20, heads, width, window, topk, dtype)
    write_op = WindowWrite()
    subjects = {}
    for tokens in (1, 20):
        operands = sequence.operands(0, tokens, sequence.window)
        written = (sequence.window, operands[1], operands[4], operands[5])
        subjects[tokens] = (
            Subject.of(sequence.op, operands, target, tokens),
            Subject.of(write_op, written, target, tokens),
        )
    library = build((subject for pair in subjects.values() for subject in pair), target)
    whole = sequence.run(library, subjects, [])
    expected = reference(sequence.op, sequence.operands(0, 20, sequence.window))[0]
    # 2^-12: a probability below 1/16 that rounds to the other bf16
    absolute = 4 * ((window + topk) * 2.0**-24 + (2.0**-12 if sequence.packed else width * 2.0**-24))
    torch.testing.assert_close(whole, expected, rtol=2.0**-8 if sequence.packed else 0.0, atol=absolute)
    for cuts in (list(range(1, 20)), [3, 4, 13], [7]):
        assert same(sequence.run(library, subjects, cuts), whole)


def test_attention_to_nothing_is_zero(target: CpuTarget) -> None:
    sequence = Sequence(3, 3, 32, 8, 0, torch.bfloat16)
    for tokens in (1, 3):
        operands = list(sequence.operands(0, tokens, sequence.window))
        operands[7] = torch.arange(tokens, dtype=torch.int32) + 1
        subject = Subject.of(sequence.op, tuple(operands), target, tokens)
        (got,) = subject.call(build([subject], target), tuple(operands))
        assert same(got, torch.zeros_like(got))
        assert same(got, reference(sequence.op, tuple(operands))[0])


@pytest.mark.parametrize("tokens", [1, 2])
def test_attention_at_release_width(tokens: int, target: CpuTarget) -> None:
    normal = seeded(5)
    count, width = 600, 512
    selection = torch.stack([normal(count).argsort()[:512].sort().values.int() for _ in range(tokens)])
    operands = (
        normal(tokens, 64, width, dtype="bf16"),
        formats.round_trip(normal(tokens, width, dtype="bf16"), "fp8_e8m0_32"),
        normal(64),
        formats.pack(normal(1, 128, width), "fp8_e8m0_32"),
        torch.arange(tokens, dtype=torch.int32) + 1000000,
        torch.zeros(tokens, dtype=torch.int32),
        torch.zeros(tokens, dtype=torch.int32),
        torch.zeros(tokens, dtype=torch.int32),
        formats.pack(normal(1, count, width), "fp4_e4m3_16"),
        selection,
    )
    op = Attention(width**-0.5, True)
    subject = Subject.of(op, operands, target, tokens)
    got = subject.call(build([subject], target), operands)[0]
    torch.testing.assert_close(got, reference(op, operands)[0], rtol=2.0**-8, atol=4 * (640 * 2.0**-24 + 2.0**-12))


# ---- the indexer -----------------------------------------------------------------------------------------------------


def exact_cases() -> Iterator[tuple[Op, Operands]]:
    for heads, width, count, topk, block in ((5, 32, 900, 40, 8), (32, 128, 300, 64, 5), (4, 64, 9000, 700, 16)):
        tokens = 6
        q, weights, keys = exact_index(tokens, heads, width, count)
        positions = ints(count - 1, 2, topk - 1, count // 2, topk, count - 3)
        slots = ints(0, 1, 0, 1, 1, 1)
        pool = torch.full((tokens, 30), -1, dtype=torch.int32)
        for row in range(tokens):
            blocks = int(positions[row]) // block + 1
            chosen = torch.randperm(blocks, generator=torch.Generator().manual_seed(row))[:30].sort().values
            pool[row, : len(chosen)] = chosen.int()
        base = (q, weights, keys, positions, slots)
        yield IndexTopk(1, topk, 0.25, block), (*base, None)
        yield IndexTopk(1, topk, 0.25, block), (*base, pool)
        yield IndexCandidates(1, topk, 0.25, block), (*base, pool)
        yield CandidateBlocks(1, 30, block, 0.25), base
        # both are chosen by scores, the rows alone, the blocks alone, neither
        for places, blocks in ((topk, 30), (topk, count), (count, 30), (count, count)):
            yield IndexTopkBlocks(1, places, blocks, block, 0.25), base
    yield IndexTopk(2, count + 50, 0.25, block), (*base, None)


def test_selection_is_exact_whatever_the_cut(target: CpuTarget) -> None:
    cases = [
        (op, operands, [Subject.of(op, operands, target, tokens) for tokens in (1, 3, 20)])
        for op, operands in exact_cases()
    ]
    library = build((subject for *_, subjects in cases for subject in subjects), target)
    for op, operands, (single, few, many) in cases:
        calls = [(many, range(6)), *((few, range(begin, begin + 3)) for begin in (0, 3))]
        calls += [(single, range(row, row + 1)) for row in range(6)]
        expected = reference(op, operands)
        for subject, rows in calls:
            found = subject.call(library, rows_of(op, operands, list(rows)))
            for ours, theirs in zip(found, expected, strict=True):
                assert same(ours, theirs[list(rows)])


def test_selection_ignores_rows_that_were_never_written(target: CpuTarget) -> None:
    q, weights, keys = exact_index(3, 4, 64, 400)
    plain = formats.unpack(keys, "fp4_e8m0_32", 64)
    positions, slots = ints(150, 199, 20), ints(0, 1, 1)
    keys[:, 200:], plain[:, 200:] = 0xFF, torch.nan
    packed: Operands = (q, weights, keys, positions, slots, None)
    exact: Operands = (q.float(), weights.float(), plain, positions, slots, None)
    op = IndexTopk(1, 30, 0.25, 8)
    subjects = [Subject.of(op, operands, target, 20) for operands in (packed, exact)]
    library = build(subjects, target)
    for subject, operands in zip(subjects, (packed, exact), strict=True):
        assert same(subject.call(library, operands)[0], reference(op, packed)[0])


def test_inexact_scores_choose_alike_away_from_the_cut(target: CpuTarget) -> None:
    normal = seeded(9)
    q = formats.round_trip(normal(2, 32, 128, dtype="bf16"), "fp4_e8m0_32")
    operands = (q, normal(2, 32, dtype="bf16"), formats.pack(normal(1, 5000, 128), "fp4_e8m0_32"))
    operands = (*operands, ints(4999, 3000), ints(0, 0), None)
    op = IndexTopk(1, 512, 128**-0.5, 8)
    subject = Subject.of(op, operands, target, 20)
    got = subject.call(build([subject], target), operands)[0]
    keys = formats.unpack(operands[2], "fp4_e8m0_32", 128)[0].double()
    weights = (operands[1] * op.scale).double()
    for row, position in enumerate((4999, 3000)):
        products = (q[row].double() @ keys[: position + 1].T).relu()
        scores = (products * weights[row].unsqueeze(1)).sum(0)
        error = (128 + 32) * 2.0**-24 * (products * weights[row].abs().unsqueeze(1)).sum(0).max()
        cut = scores.sort(descending=True).values[511]
        chosen = torch.zeros(position + 1, dtype=torch.bool)
        chosen[got[row].long()] = True
        assert len(set(got[row].tolist())) == 512
        assert chosen[scores > cut + error].all()
        assert not chosen[scores < cut - error].any()


# ---- writes ----------------------------------------------------------------------------------------------------------


def hard_rows(rows: int, width: int) -> Tensor:
    """bf16 rows of every magnitude: zeros, powers of two, the formats' largest values and their neighbours."""
    normal = seeded(rows)
    x = normal(rows, width) * torch.exp2(torch.arange(rows).remainder(60).sub(40).float()).unsqueeze(1)
    x[0] = 0.0
    x[1, ::2] = -0.0
    x[2] = torch.exp2(torch.arange(width).remainder(20).float() - 10)
    for row, largest in enumerate((448.0, 450.0, 6.0, 6.03125, 3.0e38, 1e-4, 2.0**-130), start=3):
        x[row] = x[row] / x[row].abs().max() * largest
    return x.bfloat16()


def test_packed_rows_equal_the_format_bit_for_bit(target: CpuTarget) -> None:
    x = hard_rows(64, 96)
    positions, slots = torch.arange(64, dtype=torch.int32), torch.ones(64, dtype=torch.int32)
    cases: list[tuple[Op, Operands, str, int]] = []
    for name in formats.FORMATS:
        cache = torch.full((2, 70, formats.FORMATS[name].row_bytes(96)), 0xA5, dtype=torch.uint8)
        cases.append((CacheWrite(1, name), (cache, x, positions, slots, slots * 0), name, 64))
    ring = torch.full((2, 40, 99), 0xA5, dtype=torch.uint8)
    cases.append((WindowWrite(), (ring, x, positions, slots), "fp8_e8m0_32", 40))
    subjects = [Subject.of(op, operands, target, 64) for op, operands, *_ in cases]
    library = build(subjects, target)
    for subject, (op, operands, name, kept) in zip(subjects, cases, strict=True):
        (got,) = subject.call(library, operands)
        packed = formats.pack(x, name)
        rows = positions[-kept:].long() % (40 if kept == 40 else 70)
        assert torch.equal(got[1, rows], packed[-kept:])
        assert same(got, reference(op, operands)[0])


@pytest.mark.parametrize("length", [4, 6])
def test_pooling_of_any_cut(length: int, target: CpuTarget) -> None:
    normal = seeded(3)
    tokens, width, ratio = 19, 40, 4
    k, gate = normal(tokens, width), normal(tokens, width)
    op = CompressPool(ratio, "f32")
    partial = torch.full((2, length, 2, width), torch.nan)

    def step(begin: int, end: int, partial: Tensor) -> Operands:
        count = end - begin
        positions = torch.arange(begin, end, dtype=torch.int32)
        ones, zeros = torch.ones(count, dtype=torch.int32), torch.zeros(count, dtype=torch.int32)
        return partial, k[begin:end], gate[begin:end], positions, ones, zeros

    subjects = {tokens: Subject.of(op, step(0, tokens, partial), target, tokens) for tokens in (1, 19)}
    library = build(subjects.values(), target)
    state, whole = subjects[19].call(library, step(0, tokens, partial))
    torch.testing.assert_close(
        whole, reference(op, step(0, tokens, partial))[1], rtol=0, atol=ABSOLUTE["compress_pool"]
    )
    for cuts in (list(range(1, 19)), [1, 6, 7, 11]):
        current, pooled = partial, []
        for begin, end in zip([0, *cuts], [*cuts, tokens], strict=True):
            current, rows = subjects[1 if end - begin == 1 else 19].call(library, step(begin, end, current))
            pooled.append(rows)
        assert same(torch.cat(pooled), whole)
        assert same(current, state)


# ---- the rest --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PER_TOKEN)
def test_a_token_does_not_depend_on_its_neighbours(name: str, target: CpuTarget) -> None:
    library, variants = built(name, target)
    for example, subjects in zip(examples(name), variants, strict=True):
        whole = subjects[0].call(library, example.operands)
        for row in range(token_count(example)):
            for subject in subjects:
                alone = subject.call(library, rows_of(example.op, example.operands, [row]))
                for all_rows, one in zip(whole, alone, strict=True):
                    assert same(all_rows[row : row + 1], one)


def test_rope_tables_of_a_million_positions(target: CpuTarget) -> None:
    op = RopeTable(64, 160000.0, 16.0, 65536, 32.0, 1.0, -1)
    generator = torch.Generator().manual_seed(0)
    positions = torch.randint(0, 1 << 20, (4096,), dtype=torch.int32, generator=generator)
    subject = Subject.of(op, (positions,), target, 4096)
    cos, sin = subject.call(build([subject], target), (positions,))
    angle = ((positions + op.offset).clamp_min(0).float().unsqueeze(1) * op.frequencies()).double()
    # half a unit in the last place of values below one
    assert (cos.double() - angle.cos()).abs().max() <= 2.0**-25
    assert (sin.double() - angle.sin()).abs().max() <= 2.0**-25
    for ours, theirs in zip((cos, sin), reference(op, (positions,)), strict=True):
        assert (ours - theirs).abs().max() <= 2e-7


@pytest.mark.parametrize("score", ["sqrtsoftplus", "sigmoid", "softmax"])
def test_routing_to_many_experts(score: str, target: CpuTarget) -> None:
    normal = seeded(4)
    logits, bias = normal(40, 384, scale=3.0), normal(384, scale=0.1)
    logits[0] = 0.0  # the lower of equal experts
    logits[1, 100:300], bias[100:300] = 4.0, 0.2
    logits[2] = torch.linspace(-80, 80, 384)
    op = Route(6, score, 1.5, 1.0, True)
    operands: Operands = (logits, bias, None, None)
    subject = Subject.of(op, operands, target, 40)
    ids, weights = subject.call(build([subject], target), operands)
    expected_ids, expected = reference(op, operands)
    sure = _margins(op, logits, bias) > 1e-6
    sure[:2] = True
    assert sure.sum() > 30
    assert torch.equal(ids[sure], expected_ids[sure])
    torch.testing.assert_close(weights[sure], expected[sure], rtol=1e-6, atol=0)


def _margins(op: Route, logits: Tensor, bias: Tensor) -> Tensor:
    """Difference between the last chosen and the first rejected expert."""
    scores: dict[str, Callable[[Tensor], Tensor]] = {
        "sqrtsoftplus": lambda x: torch.nn.functional.softplus(x).sqrt(),
        "sigmoid": torch.sigmoid,
        "softmax": lambda x: x.softmax(-1),
    }
    ranked = (scores[op.score](logits.double()) + bias).sort(dim=1, descending=True).values
    return ranked[:, op.experts - 1] - ranked[:, op.experts]


@pytest.mark.parametrize("length", [3, 7])
def test_hashes_are_exact(length: int, target: CpuTarget) -> None:
    generator = torch.Generator().manual_seed(1)
    multipliers = (76632096046245, 4839876093313, 35959672319349, 73987337458391)
    primes = (16000057, 16000063, 15999989, 16000079, 9999991, 9999973)
    op = EngramHash(multipliers, primes, tuple(range(0, 6 * 16000080, 16000080)), 2)
    ids = torch.randint(0, 99092, (60,), dtype=torch.int32, generator=generator)
    ids[torch.rand(60, generator=generator) < 0.1] = -1
    history = torch.randint(-1, 99092, (3, length), dtype=torch.int32, generator=generator)
    positions = torch.cat((torch.arange(20), torch.arange(20) + 1, torch.arange(20) + 1000000)).int()
    slots, starts = torch.arange(3).repeat_interleave(20).int(), torch.arange(0, 60, 20).repeat_interleave(20).int()
    operands = (ids, history, positions, slots, starts)
    subject = Subject.of(op, operands, target, 60)
    (got,) = subject.call(build([subject], target), operands)
    assert same(got, reference(op, operands)[0])


def test_a_table_beyond_two_gibibytes(target: CpuTarget) -> None:
    op, count = EngramLookup("bf16"), 9_000_000
    # pages of zeros that are never touched take no memory
    table = torch.from_numpy(np.zeros((count, 256), np.uint8))
    scale = torch.from_numpy(np.zeros((count, 8), np.uint8))
    rows = torch.tensor([[0, count - 1], [count - 2, 5_000_000]])
    normal = seeded(8)
    for number in rows.flatten().tolist():
        table[number] = (normal(256) * 60).to(torch.float8_e4m3fn).view(torch.uint8)
        scale[number] = (normal(8) * 4 + 118).to(torch.uint8)
    subject = Subject.of(op, (rows, table.view(torch.float8_e4m3fn), scale.view(torch.float8_e8m0fnu)), target, 2)
    library = build([subject], target)
    out = np.full((2, 512), 0xFFFF, np.uint16)
    library.call(subject.kernel, [rows.numpy(), table.numpy(), scale.numpy(), out], {"T": 2})
    small = (torch.arange(4).view(2, 2), table[rows.flatten()].view(torch.float8_e4m3fn))
    expected = reference(op, (*small, scale[rows.flatten()].view(torch.float8_e8m0fnu)))[0]
    assert same(torch.from_numpy(out.view(np.int16)).view(torch.bfloat16), expected)


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_drafts_follow_their_own_logits(dtype: str, target: CpuTarget) -> None:
    normal = seeded(6)
    vocabulary, rank = 1003, 24
    logits, embed = normal(7, vocabulary), normal(vocabulary, rank, dtype=dtype)
    head = normal(vocabulary, rank, dtype=dtype)
    logits[6], head[500:], embed[:500] = 1.0, 0.0, 0.0  # row 6 ties everywhere if its input is below 500
    tokens, starts = ints(3, 0, 0, 9, 0, 0, 5), ints(0, 0, 0, 3, 3, 3, 6)
    operands = (logits, tokens, starts, embed, head)
    subject = Subject.of(MarkovChain(), operands, target, 7)
    out, inputs, drafts = subject.call(build([subject], target), operands)
    assert torch.equal(drafts.long(), out.argmax(1))
    assert drafts[6] == 0
    assert inputs.tolist() == [3, drafts[0], drafts[1], 9, drafts[3], drafts[4], 5]
    bias = embed[inputs.long()].float() @ head.float().T
    torch.testing.assert_close(out, logits + bias, rtol=0, atol=rank * 2.0**-24 * 64)


def test_results_do_not_depend_on_threads() -> None:
    target = x86_64.host()
    sequence = Sequence(20, 17, 64, 8, 6, torch.bfloat16)
    cases = list(exact_cases())[-2:]
    cases.append((sequence.op, sequence.operands(0, 20, sequence.window)))
    subjects = [Subject.of(op, operands, target, 20) for op, operands in cases]
    library = build(subjects, target)
    results = []
    for threads in (1, 2, 5):
        library.handle.v41c_set_threads(threads)
        results.append([s.call(library, operands) for s, (_, operands) in zip(subjects, cases, strict=True)])
    for other in results[1:]:
        for left, right in zip(results[0], other, strict=True):
            assert all(map(same, left, right))
