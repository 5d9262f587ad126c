"""`v41c compare` without golden tensors: an engine beside the eager model and beside the noise floor."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from v41c.compare import CompareReport, compare
from v41c.difference import divergence, error, logits_row
from v41c.errors import ContextError, UsageError
from v41c.frontend.config import read_config
from v41c.frontend.engram import bucket_primes
from v41c.frontend.initialize import write_weights
from v41c.frontend.presets import TRAINED_CHECKPOINT
from v41c.subject import Notes, as_bf16

GOLDEN = Path(__file__).parent / "data" / "golden"
EngineOf = Callable[[Path, str], Path]


@pytest.fixture(scope="module")
def report(engine_of: EngineOf) -> CompareReport:
    """The trained model's engine on its default text."""
    return compare(engine_of(TRAINED_CHECKPOINT, "release"))


def test_phases_and_layers(report: CompareReport) -> None:
    names = ["prefill", "prefill, every layer fed the eager model's input", "decode"]
    assert [(phase.name, phase.tokens) for phase in report.phases] == list(zip(names, (96, 96, 16), strict=True))
    for phase in report.phases:
        streams = {row.name for row in phase.tensors}
        wanted = {
            f"layers.{n}.{kind}" for n in range(12) for kind in ("attn_in", "attn_out", "ffn_in", "ffn_out", "out")
        }
        assert wanted <= streams
        assert {row.name.rpartition(".")[2] for row in phase.integers} == {
            "engram_rows",
            "selection",
            "pool",
            "experts",
        }
        assert all(row.engine == row.rows for row in phase.integers if row.name.endswith("engram_rows"))
    assert report.phases[1].logits is None
    assert report.passed


def test_a_layer_alone_is_nearly_exact(report: CompareReport) -> None:
    """Fed the same input, a layer differs by the order of sums: bounds are ten times what was measured."""
    alone = report.phases[1]
    for row in alone.tensors:
        if not row.name.endswith(".in"):
            assert row.engine.relative_l2 <= 2e-2, row.name
    outs = [row.engine.relative_l2 for row in alone.tensors if row.name.endswith(".out")]
    assert max(outs) <= 2e-3
    for integers in alone.integers:
        assert integers.engine >= 0.95 * integers.rows, integers.name


def test_logits_stand_beside_their_floor(report: CompareReport) -> None:
    """A trained model: whatever two orders of sums make of it, its tokens and distributions are nearly the same."""
    for phase in (report.phases[0], report.phases[2]):
        assert phase.logits is not None
        assert phase.logits_floor is not None
        for row in (phase.logits, phase.logits_floor):
            assert row.error.relative_l2 <= 0.1
            assert 0 <= row.kl_nats <= 0.05
            assert row.top1_agreement >= 0.9
        # the floor is another order of sums: it is not nothing
        assert phase.logits_floor.error.max_abs > 0


def test_ced_is_full_up_to_the_window(report: CompareReport) -> None:
    window, *longer = report.ced
    assert (window.prompt_tokens, window.prefill.error.max_abs, window.decode.error.max_abs) == (32, 0.0, 0.0)
    assert [row.prompt_tokens for row in longer] == [64, 96]
    assert all(row.prefill.error.relative_l2 > 0 for row in longer)
    assert all(row.decode.kl_nats < 0.2 for row in longer)


def test_the_report_is_text_and_json(report: CompareReport) -> None:
    text = report.summary()
    for words in (
        "prefill: 96 tokens",
        "layers.11",
        "floor: rel. L2",
        "of 1152 rows equal",
        "ced against full prefill",
    ):
        assert words in text
    assert len({len(line) for line in text.splitlines()}) > 1
    again = json.loads(json.dumps(report.to_json()))
    assert again["passed"] is True
    assert again["phases"][0]["tensors"][0]["name"] == "layers.0.in"
    assert again["phases"][0]["tensors"][0]["engine"] == {"max_abs": 0.0, "mean_abs": 0.0, "relative_l2": 0.0}


def test_an_exact_engine_is_the_exact_eager_model(engine_of: EngineOf) -> None:
    """Nothing amplifies a rounding here: every stream to 1e-5 end to end, every integer equal, prefill and decode."""
    report = compare(engine_of(GOLDEN / "case_04", "exact"), checkpoint=GOLDEN / "case_04")
    for phase in report.phases:
        assert max(row.engine.relative_l2 for row in phase.tensors) <= 1e-5
        assert all(row.engine == row.floor == row.rows for row in phase.integers)


def odd_checkpoint(folder: Path) -> Path:
    """No power of two anywhere: ratios 8 and 3, three copies, a window of 3, 5 experts of 21 in fp8, blocks of 5."""
    given = json.loads((GOLDEN / "case_00" / "config.json").read_text())
    plan = {
        "n_layers": 5,
        "n_mtp_layers": 1,
        "compress_ratios": [8, 8, 3, 3, 0, 0],
        "kv_source_layers": [0, 2],
        "index_source_layers": [0, 1, 2, 3],
        "candidate_source_layer": 2,
        "candidate_topk_blocks": 3,
        "candidate_block_size": 5,
        "index_topk": 7,
        "dspark_target_layer_ids": [0],
        "dspark_block_size": 2,
    }
    sizes = {"window_size": 3, "hc_mult": 3, "dim": 160, "n_heads": 3, "o_groups": 3, "head_dim": 96}
    experts = {"expert_dtype": "fp8", "n_routed_experts": 21, "n_activated_experts": 5, "score_func": "softmax"}
    engram = {"engram_layer_ids": [0], "engram_max_ngram_size": 3, "engram_n_heads": 3, "engram_vocab_size": 50}
    engram["engram_num_embeddings"] = [sum(bucket_primes(1, 2, 3, 50)[0])]
    flat = given | plan | sizes | experts | engram | {"vision_n_layers": 0, "original_seq_len": 0}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(flat))
    shutil.copyfile(GOLDEN / "case_00" / "tokenizer.json", folder / "tokenizer.json")
    write_weights(folder, read_config(folder), 1, lambda done, total: None)
    return folder


def test_an_odd_shape_is_compiled_as_it_is(engine_of: EngineOf, tmp_path: Path) -> None:
    """Exact arithmetic shows any index that is off; 75 tokens close many groups of every ratio."""
    checkpoint = odd_checkpoint(tmp_path / "odd")
    tokens = np.random.default_rng(3).integers(5, 500, 75).tolist()
    report = compare(engine_of(checkpoint, "exact"), checkpoint=checkpoint, tokens=tokens, decode_steps=8)
    for phase in report.phases:
        assert max(row.engine.relative_l2 for row in phase.tensors) <= 1e-5
        assert all(row.engine == row.rows for row in phase.integers)


def test_given_tokens(engine_of: EngineOf) -> None:
    engine = engine_of(GOLDEN / "case_02", "exact")
    report = compare(engine, checkpoint=GOLDEN / "case_02", tokens=range(5, 29), decode_steps=3)
    assert [(phase.name, phase.tokens) for phase in report.phases[::2]] == [("prefill", 21), ("decode", 3)]
    with pytest.raises(UsageError, match="tokens: expected more than the 16 that are decoded, got 16"):
        compare(engine, checkpoint=GOLDEN / "case_02", tokens=range(16))
    with pytest.raises(ContextError, match="tokens: expected at most 512, what the engine was compiled for, got 600"):
        compare(engine, checkpoint=GOLDEN / "case_02", tokens=[5] * 600)


def test_the_checkpoint_must_be_the_engines(engine_of: EngineOf, tmp_path: Path) -> None:
    engine = engine_of(GOLDEN / "case_02", "exact")
    with pytest.raises(UsageError, match=r"it was not made of the shipped checkpoint: give its own with --checkpoint$"):
        compare(engine)
    with pytest.raises(UsageError, match=r"case_04: expected the checkpoint of .*, found another configuration$"):
        compare(engine, checkpoint=GOLDEN / "case_04")
    other = tmp_path / "other"
    shutil.copytree(GOLDEN / "case_02", other)
    tensors = load_file(other / "model.safetensors")
    tensors["layers.3.attn.attn_sink"] += 1
    save_file(tensors, other / "model.safetensors")
    with pytest.raises(
        UsageError, match=r"other: layers\.3\.attn\.attn_sink: expected the weights that .* was made of"
    ):
        compare(engine, checkpoint=other)
    with pytest.raises(UsageError, match="another configuration"):
        compare(engine, golden=GOLDEN / "case_04", checkpoint=GOLDEN / "case_02")


def test_divergence_by_hand() -> None:
    wanted = np.log(np.array([[0.5, 0.25, 0.25]]))
    found = np.log(np.array([[0.25, 0.5, 0.25]])) + 3
    np.testing.assert_allclose(divergence(found, wanted), [0.5 * np.log(2) - 0.25 * np.log(2)])
    assert divergence(wanted, wanted) == 0
    row = logits_row(found, wanted)
    assert row.top1_agreement == 0
    assert error(np.array([1.0, 2.0]), np.array([1.0, 4.0])).max_abs == 2


def test_notes_keep_chunks_in_order_and_force_rows() -> None:
    notes = Notes({"layers.0.out": np.arange(10.0)})
    assert notes("layers.0.in", 0, np.zeros(3)) is None
    np.testing.assert_array_equal(notes("layers.0.out", 3, np.full(2, 9.0)), [3.0, 4.0])
    notes("layers.0.out", 0, np.full(3, 8.0))
    np.testing.assert_array_equal(notes.values["layers.0.out"], [8, 8, 8, 9, 9])


def test_replacements_are_rounded_as_torch_rounds() -> None:
    values = torch.cat((torch.randn(1000, generator=torch.Generator().manual_seed(1)), torch.tensor([0.0, -0.0, 1e30])))
    wanted = values.bfloat16().view(torch.uint16).numpy()
    np.testing.assert_array_equal(as_bf16(values.numpy()), wanted)
