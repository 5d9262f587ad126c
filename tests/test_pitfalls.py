"""What other engines of this architecture got wrong: each line with the right value as the expectation.

`COVERED` says which tests own which line; lines that no other file owns are tested here. The numbers are this table's.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import TypeVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.codegen.sparse_harness import Subject, build
from tests.traced import FOLDERS, traced
from v41c.frontend import load
from v41c.frontend.config import read_config
from v41c.frontend.engram import multipliers
from v41c.frontend.presets import RELEASE_CONFIG
from v41c.ir import formats
from v41c.ir.graph import Graph, Node, Value
from v41c.ir.op import Op, seeded
from v41c.ir.ops.attention import Attention
from v41c.ir.ops.candidate_blocks import CandidateBlocks
from v41c.ir.ops.engram_hash import EngramHash
from v41c.ir.ops.hc_coefficients import HcCoefficients
from v41c.ir.ops.index_topk import IndexTopk
from v41c.ir.ops.linear import Linear
from v41c.ir.ops.moe_experts import MoeExperts
from v41c.ir.ops.rope import Rope
from v41c.ir.ops.rope_table import RopeTable
from v41c.ir.ops.round_trip import RoundTrip
from v41c.ir.ops.route import Route
from v41c.ir.text import parse_module, print_module
from v41c.subject import EagerSubject, Notes
from v41c.targets.target import find_target

HERE = "test_pitfalls"
COVERED = {
    "1 index keys of the wrong layer while a group is open": (
        "test_golden:test_a_known_fault_is_another_model",
        f"{HERE}:test_a_source_scores_against_its_own_keys_while_its_group_is_open",
    ),
    "2 Sinkhorn repaired with a last row step": (
        "test_golden_units:test_sinkhorn",
        f"{HERE}:test_mixing_sums_to_one_over_columns_and_only_nearly_over_rows",
    ),
    "3 an RMS norm per head on queries": (f"{HERE}:test_nothing_normalises_a_head_of_the_query",),
    "4 fp8 blocks of 128": (
        "test_golden_units:test_fp8_product",
        f"{HERE}:test_weight_scales_are_of_32_by_32_and_activation_scales_of_32",
    ),
    "5 the activation not quantised before w2": (
        f"{HERE}:test_every_input_of_a_quantised_weight_went_through_its_round_trip",
    ),
    "6 a floating-point logarithm in the scale rule": (
        "test_golden_units:test_scales_at_exact_powers_of_two",
        f"{HERE}:test_power_of_two_scales_are_the_smallest_that_fit",
    ),
    "7 power-of-two scales for compressed rows": (
        "test_golden_units:test_round_trips",
        f"{HERE}:test_compressed_rows_have_rounded_e4m3_scales",
    ),
    "8 Engram: multipliers through doubles, history, images, rejected drafts": (
        "frontend.test_engram:test_release_constants",
        "test_golden_units:test_engram_rows",
        "frontend.test_model:test_a_draft_leaves_no_trace",
        "test_chunking:test_a_verification_that_is_taken_back",
        f"{HERE}:test_multipliers_stay_exact_in_text",
    ),
    "9 draft: taps after the layer, causal blocks, confidence of the normed state": (
        "test_golden:test_the_eager_model_meets_the_criteria",
        "test_golden_units:test_draft_block_sees_itself_whole",
        f"{HERE}:test_the_draft_head_taps_before_layers_and_reads_confidence_before_its_norm",
    ),
    "10 theta and YaRN by tensor": (f"{HERE}:test_every_rotation_of_a_layer_has_the_layers_angles",),
    "11 compressed rows rotated at their last token, visible too early": (
        "test_golden:test_caches_are_the_golden_ones",
        f"{HERE}:test_a_compressed_row_is_rotated_at_its_first_token",
        f"{HERE}:test_a_compressed_row_is_visible_from_its_last_token_on",
    ),
    "12 groups lost at odd ends, prefill of one token": (
        "test_golden_units:test_compressor",
        "frontend.test_model:test_any_grouping_of_the_tokens",
        "frontend.test_model:test_first_and_last_lengths_in_release_arithmetic",
    ),
    "13 newest block outscored, candidates beyond the pool, ties by width": (
        "test_golden_units:test_candidate_blocks",
        f"{HERE}:test_the_newest_block_is_always_kept",
        f"{HERE}:test_later_selections_stay_within_the_pool",
        f"{HERE}:test_ties_do_not_depend_on_the_width_of_the_cache",
    ),
    "14 top-k of nothing, and of rectified zeros": (f"{HERE}:test_selection_of_nothing_and_of_equal_zeros",),
    "15 router bias as weight, image tokens, 384 experts": (
        "test_golden_units:test_gate",
        f"{HERE}:test_the_bias_of_384_experts_chooses_and_does_not_weigh",
    ),
    "16 angles in double precision": (
        "test_golden_units:test_rope_angles",
        f"{HERE}:test_angles_are_single_precision_products",
    ),
    "17 right at tiny sizes, wrong at the release's": (
        f"{HERE}:test_a_needle_beyond_a_hundred_thousand_rows",
        f"{HERE}:test_formats_at_release_widths_and_large_magnitudes",
    ),
}


def test_every_line_names_tests_that_exist() -> None:
    assert [int(line.split()[0]) for line in COVERED] == list(range(1, 18))
    for tests in COVERED.values():
        for name in tests:
            module, _, function = name.partition(":")
            assert callable(getattr(importlib.import_module(f"tests.{module}"), function)), name


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


Kind = TypeVar("Kind", bound=Op)


def uses(graph: Graph, kind: type[Kind]) -> Iterator[tuple[Node, Kind]]:
    """The nodes of one operation, and the operation."""
    yield from ((node, node.op) for node in graph.nodes if isinstance(node.op, kind))


def operand(node: Node, index: int) -> Value:
    """An operand that must be there."""
    value = node.operands[index]
    assert value is not None
    return value


def made_of(graph: Graph, value: Value | None) -> Iterator[Node]:
    """The node that makes a value, then the node that makes that one's first operand, and so on."""
    producers = graph.producers
    while value in producers:
        yield producers[value]
        value = producers[value].operands[0]


# line 1


@pytest.mark.parametrize("spoiled", ["layers.2.index_keys", "layers.4.index_keys"])
def test_a_source_scores_against_its_own_keys_while_its_group_is_open(spoiled: str) -> None:
    """Layers 2 (ratio 2) and 4 (ratio 1) are sources. At an even position the group of layer 2 is open."""
    model = load(str(FOLDERS["case_00"]), "exact")
    tokens = np.random.default_rng(7).integers(5, 500, 41)
    chosen = []
    for spoil in (False, True):
        subject = EagerSubject(model)
        subject.start(41)
        subject.feed(tokens[:40], Notes())
        if spoil:
            subject.states[spoiled][:, :20] = -subject.states[spoiled][:, :20].flip(1)
        notes = Notes()
        subject.decode(int(tokens[40]), notes)
        chosen.append({layer: notes.values[f"layers.{layer}.selection"].tolist() for layer in (2, 4)})
    owner = int(spoiled.split(".")[1])
    assert chosen[0][owner] != chosen[1][owner]
    if owner == 4:
        assert chosen[0][2] == chosen[1][2]


# line 2


def test_mixing_sums_to_one_over_columns_and_only_nearly_over_rows() -> None:
    """`comb` is [source, target]: each target's column is whole. Rows are off by up to 8e-2, and that is right."""
    normal = seeded(1)
    stream, base = normal(400, 4, 64), normal(24, scale=4)
    fn = normal(24, 256, scale=0.5)
    _, _, comb = HcCoefficients(1e-20, 1e-6, 20).reference(stream, fn, torch.ones(3), base)
    assert (comb.sum(1) - 1).abs().max() < 1e-5
    assert (comb.sum(2) - 1).abs().max() > 1e-2


# line 3


@pytest.mark.parametrize("case", FOLDERS)
def test_nothing_normalises_a_head_of_the_query(case: str) -> None:
    """Between `wq_b` and attention stand a reshape and the rotation, and nothing else."""
    graph = traced(case)[1]["model"]
    for node, _ in uses(graph, Attention):
        made = [maker.op.name() for maker in made_of(graph, node.operands[0])]
        assert made[:3] == ["rope", "reshape", "linear"]


# line 4


def test_weight_scales_are_of_32_by_32_and_activation_scales_of_32() -> None:
    scale = (torch.arange(9).view(3, 3) + 120).to(torch.uint8).view(torch.float8_e8m0fnu)
    weight = formats.dequantize(torch.ones(70, 96).to(torch.float8_e4m3fn), scale)
    for row, column in ((0, 0), (31, 31), (32, 31), (31, 32), (63, 64), (64, 63), (69, 95)):
        assert weight[row, column] == 2.0 ** (120 + 3 * (row // 32) + column // 32 - 127)
    # a group next to one a million times larger keeps all of its digits
    x = torch.cat((torch.full((1, 32), 3e5), torch.linspace(0.1, 0.4, 32).view(1, 32)), 1)
    small = formats.round_trip(x, "fp8_e8m0_32")[0, 32:]
    assert (small / x[0, 32:] - 1).abs().max() <= 2**-4


# line 5


def test_every_input_of_a_quantised_weight_went_through_its_round_trip() -> None:
    """Dense fp8 weights, the shared expert's `w2` among them; routed experts quantise their activation themselves."""
    for graph in traced("case_00")[1]:
        checked = 0
        for node in graph.nodes:
            if isinstance(node.op, Linear) and node.operand("scale") is not None:
                maker = next(made_of(graph, node.operands[0]))
                assert maker.op == RoundTrip("fp8_e8m0_32"), node.origin.module
                checked += 1
            if isinstance(node.op, MoeExperts):
                assert node.op.format == "fp8_e8m0_32"
        assert checked or graph.name in ("draft_context", "vision")
    # `wo_a` and what is bf16 take their input as it is
    for node in traced("case_02")[1]["model"].nodes:
        assert not (
            isinstance(node.op, RoundTrip) and node.op.format == "fp8_e8m0_32" and "attn" not in node.origin.module
        )


# line 6


@settings(max_examples=300, deadline=None)
@given(amax=st.floats(2.0**-120, 2.0**120, width=32), name=st.sampled_from(["fp8_e8m0_32", "fp4_e8m0_32"]))
def test_power_of_two_scales_are_the_smallest_that_fit(amax: float, name: str) -> None:
    """Against exact rational arithmetic: 2^(e−1) < max(amax, floor) / largest ≤ 2^e."""
    format = formats.FORMATS[name]
    scale = Fraction(float(formats.scales(torch.tensor([[amax]]), format)))
    ratio = max(Fraction(amax), Fraction(float(np.float32(format.floor)))) / Fraction(format.largest)
    assert scale / 2 < ratio <= scale


# line 7


def test_compressed_rows_have_rounded_e4m3_scales() -> None:
    x = torch.zeros(4, 16)
    x[:, 0] = torch.tensor([7.0, 6 * 1.0625, 1e-9, 6 * 500.0])
    packed = formats.pack(x, "fp4_e4m3_16")
    scales = packed[:, 8:].view(torch.float8_e4m3fn).float().flatten()
    # 7/6 lies between 1.125 and 1.25; 1.0625 is a tie between 1 and 1.125, even wins; the floor; saturation
    assert scales.tolist() == [1.125, 1.0, 2.0**-9, 448.0]
    assert formats.round_trip(x, "fp4_e4m3_16")[3, 0] == 6 * 448.0


# line 8


def test_multipliers_stay_exact_in_text() -> None:
    """A small vocabulary has multipliers beyond 2^53, where doubles skip odd numbers."""
    source, module = traced("case_00")
    written = [op for _, op in uses(module["model"], EngramHash)]
    again = [op for _, op in uses(parse_module(print_module(module))["model"], EngramHash)]
    assert [op.multipliers for op in again] == [multipliers(layer, source.config) for layer in (1, 3)]
    assert again == written
    assert max(number for op in written for number in op.multipliers) > 2**53
    assert any(int(float(number)) != number for op in written for number in op.multipliers)


# line 9


@pytest.mark.parametrize("case", ["case_00", "case_04", "tiny-v41"])
def test_the_draft_head_taps_before_layers_and_reads_confidence_before_its_norm(case: str) -> None:
    source, module = traced(case)
    graph = module["model"]
    taps = [operand(node, 0).name for node in graph.nodes if node.op.name() == "stream_mean"]
    entering = [
        f"layers.{t}.in" if t in source.config.engram_layer_ids else f"layers.{t - 1}.out"
        for t in source.config.dspark_target_layer_ids
    ]
    assert taps == entering
    draft = module["draft"]
    assert all(not op.causal for _, op in uses(draft, Attention))
    confidence = next(node for node in draft.nodes if node.results[0].name == "confidence")
    joined = next(made_of(draft, confidence.operands[0]))
    hidden = next(made_of(draft, joined.operands[0]))
    assert (joined.op.name(), hidden.op.name()) == ("concat", "hc_mix")
    base = next(node for node in draft.nodes if node.op.name() == "markov_chain").operands[0]
    assert [node.op.name() for node in made_of(draft, base)][:3] == ["linear", "rms_norm", "hc_mix"]


# lines 10 and 11


def rotations(case: str) -> Iterator[tuple[int, Node, RopeTable]]:
    """Layer, rotation and angles of every rotation of the backbone."""
    graph = traced(case)[1]["model"]
    producers = graph.producers
    for node, _ in uses(graph, Rope):
        table = producers[operand(node, 1)].op
        assert isinstance(table, RopeTable)
        yield int(node.origin.module.split(".")[1]), node, table


@pytest.mark.parametrize("case", FOLDERS)
def test_every_rotation_of_a_layer_has_the_layers_angles(case: str) -> None:
    """Queries, window keys, rows, index queries and keys alike; only layers without compression use the plain ones."""
    c = traced(case)[0].config
    seen = set()
    for layer, _, table in rotations(case):
        theta = c.compress_rope_theta if c.ratio(layer) else c.rope_theta
        assert (table.theta, table.original_length) == (theta, c.original_seq_len if c.ratio(layer) else 0)
        seen.add(layer)
    assert seen == set(range(c.n_layers))
    release = read_config(RELEASE_CONFIG)
    assert (release.rope_theta, release.compress_rope_theta, release.original_seq_len) == (10000, 160000, 65536)


@pytest.mark.parametrize("case", FOLDERS)
def test_a_compressed_row_is_rotated_at_its_first_token(case: str) -> None:
    c, rows = traced(case)[0].config, 0
    for layer, node, table in rotations(case):
        compresses = "compressor" in node.origin.module
        if c.mode(layer) == "full" and (compresses or "k_norm" in operand(node, 0).name):
            assert table.offset == 1 - c.ratio(layer)
            rows += 1
        else:
            assert table.offset == 0
    assert rows == 2 * len(c.kv_source_layers)
    cos, _ = RopeTable(16, 160000.0, 16.0, 64, 32.0, 1.0, -1).reference(ints(0, 1, 7))
    assert torch.equal(cos, RopeTable(16, 160000.0, 16.0, 64, 32.0, 1.0, 0).reference(ints(0, 0, 6))[0])


@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_a_compressed_row_is_visible_from_its_last_token_on(ratio: int) -> None:
    """Row j to the token at position t iff j < (t + 1) // r: at its last token for the first time."""
    positions = torch.arange(4 * ratio, dtype=torch.int32)
    keys = torch.ones(1, 64, 32)
    q, weights = torch.ones(len(positions), 2, 32), torch.ones(len(positions), 2)
    found = IndexTopk(ratio, 8, 1.0, 4).reference(q, weights, keys, positions, torch.zeros_like(positions))
    for position, row in zip(positions.tolist(), found, strict=True):
        assert row[row >= 0].tolist() == list(range((position + 1) // ratio))


# lines 13 and 14


def scored(scores: list[float], width: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, weights and keys of one token whose index scores are `scores`; what lies beyond them is NaN."""
    keys = torch.full((1, width, 2), torch.nan)
    values = torch.tensor(scores)
    keys[0, : len(scores)] = torch.stack((values.relu(), (-values).relu()), 1)
    return torch.eye(2).view(1, 2, 2), torch.tensor([[1.0, -1.0]]), keys


def test_the_newest_block_is_always_kept() -> None:
    """With the worst score of all, and it counts toward the limit."""
    scores = [5.0, 4.0, 9.0, 8.0, 7.0, 6.0, -3.0]
    op = CandidateBlocks(1, 2, 2, 1.0)
    assert op.reference(*scored(scores, 7), ints(6), ints(0)).tolist() == [[1, 3]]
    # a block's score is its best row's, seen rows only
    assert op.reference(*scored(scores, 7), ints(4), ints(0)).tolist() == [[1, 2]]


def test_later_selections_stay_within_the_pool() -> None:
    """Fewer candidates than wanted leave −1, however good the rows outside are."""
    op = IndexTopk(1, 4, 1.0, 2)
    operands = (*scored([9.0, 9.0, 1.0, -2.0, 9.0, 9.0, 0.5], 7), ints(6), ints(0))
    assert op.reference(*operands, ints(1, 3).view(1, 2)).tolist() == [[2, 3, 6, -1]]
    assert op.reference(*operands, ints(1, -1).view(1, 2)).tolist() == [[2, 3, -1, -1]]
    assert op.reference(*operands, None).tolist() == [[0, 1, 4, 5]]


@pytest.mark.parametrize("width", [7, 8, 61, 64, 1000])
def test_ties_do_not_depend_on_the_width_of_the_cache(width: int) -> None:
    operands = (*scored([1.0, 3.0, 3.0, 1.0, 3.0, 1.0, 1.0], width), ints(6), ints(0))
    assert IndexTopk(1, 5, 1.0, 2).reference(*operands).tolist() == [[0, 1, 2, 3, 4]]
    assert IndexTopk(1, 2, 1.0, 2).reference(*operands).tolist() == [[1, 2]]
    assert CandidateBlocks(1, 3, 2, 1.0).reference(*operands).tolist() == [[0, 1, 3]]


def test_selection_of_nothing_and_of_equal_zeros() -> None:
    """No visible row selects nothing. Where every head is rectified to 0 all rows tie: the first ones win."""
    assert IndexTopk(2, 3, 1.0, 2).reference(*scored([1.0], 1), ints(0), ints(0)).tolist() == [[-1, -1, -1]]
    assert CandidateBlocks(2, 3, 2, 1.0).reference(*scored([1.0], 1), ints(0), ints(0)).tolist() == [[-1, -1, -1]]
    q, keys = torch.ones(1, 4, 32), -torch.ones(1, 40, 32)
    for sign in (1.0, -1.0):  # a negative weight turns the zeros into −0
        weights = torch.full((1, 4), sign)
        found = IndexTopk(1, 3, 1.0, 8).reference(q, weights, keys, ints(30), ints(0))
        assert found.tolist() == [[0, 1, 2]]
        pool = CandidateBlocks(1, 2, 8, 1.0).reference(q, weights, keys, ints(30), ints(0))
        assert pool.tolist() == [[0, 3]]


# line 15


def test_the_bias_of_384_experts_chooses_and_does_not_weigh() -> None:
    logits = torch.zeros(2, 384)
    logits[:, 383] = 1.0
    bias, image_bias = torch.zeros(384), torch.zeros(384)
    bias[300], image_bias[17] = 10.0, 10.0
    ids, weights = Route(2, "sqrtsoftplus", 1.5, 1.0, True).reference(
        logits, bias, image_bias, torch.tensor([False, True])
    )
    assert ids.tolist() == [[300, 383], [17, 383]]
    plain, chosen = math.sqrt(math.log1p(1.0)), math.sqrt(math.log1p(math.e))
    wanted = torch.tensor([plain, chosen]) / (plain + chosen) * 1.5
    torch.testing.assert_close(weights, wanted.expand(2, 2))


# line 16


def test_angles_are_single_precision_products() -> None:
    """At a million tokens a double-precision angle is another angle."""
    op, position = RopeTable(64, 10000.0, 16.0, 0, 32.0, 1.0, 0), 1048575
    cos, sin = op.reference(ints(position))
    frequencies = op.frequencies()
    product = (np.float32(position) * frequencies.numpy()).astype(np.float64)
    np.testing.assert_allclose(cos[0], np.cos(product), atol=2e-7)
    np.testing.assert_allclose(sin[0], np.sin(product), atol=2e-7)
    doubled = np.float64(position) * frequencies.double().numpy()
    assert np.abs(np.cos(doubled) - cos[0].numpy()).max() > 1e-3


# line 17


def both_ways(op: Op, *operands: Tensor | None) -> Callable[[], list[Tensor]]:
    """The result of an operation by its reference and by its kernel of this machine."""
    target = find_target("cpu")
    subject = Subject.of(op, operands, target, 1)
    library = build([subject], target)
    return lambda: [op.reference(*operands), subject.call(library, operands)[0]]


def test_a_needle_beyond_a_hundred_thousand_rows() -> None:
    """Release shapes: 32 index heads of 128, rows of 68 and 288 bytes, one good row among 131,072 poor ones.

    A wrong scale layout, row size or 32-bit offset passes every short prompt and misses this row.
    """
    rows, needle, normal = 131072, 120011, seeded(17)
    position, slot = ints(rows - 1), ints(0)
    direction = normal(1, 1, 128)
    keys = formats.pack(normal(64, 128).repeat(rows // 64, 1) * 0.05, "fp4_e8m0_32").view(1, rows, 68)
    keys[0, needle] = formats.pack(direction[0], "fp4_e8m0_32")[0]
    q = formats.round_trip(direction.repeat(1, 32, 1).bfloat16(), "fp4_e8m0_32")
    weights = torch.ones(1, 32, dtype=torch.bfloat16)
    for found in both_ways(CandidateBlocks(1, 16, 8, 0.01), q, weights, keys, position, slot)():
        assert needle // 8 in found[0]
    for found in both_ways(IndexTopk(1, 4, 0.01, 8), q, weights, keys, position, slot, None)():
        assert needle in found[0]

    compressed = torch.full((1, rows, 288), 0xFF, dtype=torch.uint8)  # NaN scales wherever nobody may look
    value = normal(1, 512) * torch.linspace(0.01, 100, 512)
    compressed[0, needle] = formats.pack(value, "fp4_e4m3_16")[0]
    selection = ints(needle, -1, -1, -1).view(1, 4)
    kv = torch.full((1, 512), torch.nan, dtype=torch.bfloat16)
    window = torch.full((1, 128, 528), 0xFF, dtype=torch.uint8)
    operands = (
        torch.zeros(1, 8, 512, dtype=torch.bfloat16),
        kv,
        torch.full((8,), -30.0),
        window,
        position,
        slot,
        ints(0),
    )
    shut = position + 1
    wanted = formats.round_trip(value, "fp4_e4m3_16").bfloat16()
    for found in both_ways(Attention(512**-0.5, True), *operands, shut, compressed, selection)():
        torch.testing.assert_close(found[0], wanted.expand(8, 512), rtol=2**-8, atol=0)


@pytest.mark.parametrize(
    ("name", "width", "row"), [("fp8_e8m0_32", 512, 528), ("fp4_e8m0_32", 128, 68), ("fp4_e4m3_16", 512, 288)]
)
def test_formats_at_release_widths_and_large_magnitudes(name: str, width: int, row: int) -> None:
    """Every group has its own magnitude, over 40 powers of two; packed rows are what the round trip says."""
    magnitudes = 2.0 ** torch.arange(-20, 20).float()
    x = seeded(3)(40, width) * magnitudes[torch.arange(width) % 40]
    packed = formats.pack(x, name)
    assert packed.shape == (40, row)
    assert torch.equal(formats.unpack(packed, name, width), formats.round_trip(x, name))
    format = formats.FORMATS[name]
    groups = x.unflatten(-1, (-1, format.group))
    error = (formats.round_trip(x, name).unflatten(-1, (-1, format.group)) - groups).abs()
    coarsest = 2**-4 if format.element_bits == 8 else 2**-1
    inside = groups.abs().amax(-1, keepdim=True) < 448 * 6 if name == "fp4_e4m3_16" else torch.tensor(True)
    assert (error <= coarsest * groups.abs().amax(-1, keepdim=True))[inside.expand_as(error)].all()
