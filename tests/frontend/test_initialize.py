"""Random checkpoints: complete, loadable, well scaled, the same for the same seed, and never half-written."""

from __future__ import annotations

import errno
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from v41c.errors import CheckpointError, UsageError
from v41c.frontend import initialize as module
from v41c.frontend.checkpoint import Checkpoint, expected_tensors
from v41c.frontend.config import ModelConfig, parse_config, read_config
from v41c.frontend.initialize import initialize
from v41c.frontend.presets import PRESETS, build_tokenizer, flat_config, preset_named
from v41c.frontend.quantize import quantize_blocks, quantize_rows
from v41c.frontend.tokenizer import Tokenizer, compressed_ids, count_compressed_ids
from v41c.ir.formats import dequantize

ROOT = Path(__file__).resolve().parents[2]


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("init") / "tiny"
    initialize(folder, "tiny", seed=3)
    return folder


def test_tiny_is_a_complete_checkpoint(tiny: Path) -> None:
    config = read_config(tiny)
    checkpoint = Checkpoint(tiny)
    checkpoint.verify(config)
    tokenizer = Tokenizer(tiny, config)
    assert tokenizer.vocab_size == config.vocab_size
    assert compressed_ids(tokenizer, config).max() == config.engram_compressed_vocab_size - 1
    assert (config.has_engram, config.has_draft, config.dtype, config.expert_dtype) == (True, True, "fp8", "fp4")
    assert {config.mode(layer) for layer in range(config.n_layers)} == {"window", "full", "reindex", "reuse"}
    assert (config.bos_id, config.eos_ids, config.pad_id) == (0, (1,), 2)
    assert config.extra == {"v41c_preset": "tiny", "v41c_seed": 3}
    assert sum(len(content) for content in files(tiny).values()) < 4 * 2**20


def test_the_seed_decides_every_byte(tiny: Path, tmp_path: Path) -> None:
    initialize(tmp_path / "again", "tiny", seed=3)
    assert files(tmp_path / "again") == files(tiny)
    initialize(tmp_path / "other", "tiny", seed=4)
    assert files(tmp_path / "other")["model.safetensors"] != files(tiny)["model.safetensors"]


def test_sharding_changes_no_tensor(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHARD_BYTES", 500_000)
    reports: list[tuple[int, int]] = []
    config = initialize(
        tmp_path / "sharded", "tiny", seed=3, progress=lambda done, total: reports.append((done, total))
    )
    shards = sorted((tmp_path / "sharded").glob("model-*-of-*.safetensors"))
    assert len(shards) == len(reports) > 3
    assert [done for done, _ in reports] == sorted(done for done, _ in reports)
    assert reports[-1][0] == reports[-1][1]
    single, sharded = Checkpoint(tiny), Checkpoint(tmp_path / "sharded")
    sharded.verify(config)
    for name in single:
        assert torch.equal(single.tensor(name).view(torch.uint8), sharded.tensor(name).view(torch.uint8)), name


def test_values_are_well_scaled(tiny: Path) -> None:
    checkpoint = Checkpoint(tiny)
    for name in checkpoint:
        values = checkpoint.dequantized(name)
        assert torch.isfinite(values).all(), name
        assert values.abs().max() > 0, name
        if name.endswith(("wq_a.weight", "wq_b.weight", "wkv.weight", "gate.weight", "w1.weight")):
            assert values.std().item() * math.sqrt(values.shape[-1]) == pytest.approx(1.0, rel=0.1), name
        if name.endswith("norm.weight"):
            assert values.mean().item() == pytest.approx(1.0, abs=0.1), name


def test_stored_elements_use_their_range(tiny: Path) -> None:
    checkpoint = Checkpoint(tiny)
    weights = checkpoint.tensor("layers.0.attn.wq_b.weight").float().unflatten(1, (-1, 32)).unflatten(0, (-1, 32))
    largest = weights.abs().amax(dim=(1, 3))
    assert (largest > 448 / 2 / 1.07).all()  # amax rounds into (224, 448]
    assert (largest <= 448).all()


def test_release_config_only(tmp_path: Path) -> None:
    config = initialize(tmp_path / "release", "release-config-only")
    assert [file.name for file in (tmp_path / "release").iterdir()] == ["config.json"]
    assert "text_config" in (tmp_path / "release" / "config.json").read_text()
    assert read_config(tmp_path / "release") == config == read_config(ROOT / "v41c" / "data" / "release")


def preset_config(name: str, tmp_path: Path) -> ModelConfig:
    preset = preset_named(name)
    assert preset.flat is not None
    (tmp_path / "tokenizer.json").write_text(build_tokenizer(preset.flat["vocab_size"]), encoding="utf-8")
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.vocab_size == preset.flat["vocab_size"]
    return parse_config(flat_config(preset, count_compressed_ids(tokenizer)))


def test_small_is_a_mid_size_model(tmp_path: Path) -> None:
    config = preset_config("small", tmp_path)
    specs = expected_tensors(config)
    parameters = sum(
        math.prod(spec.shape) * (2 if spec.dtype == "I8" else 1) for spec in specs.values() if spec.dtype != "F8_E8M0"
    )
    assert 150e6 < parameters < 200e6
    assert sum(spec.size_bytes for spec in specs.values()) < 160 * 2**20
    assert config.index_n_heads >= 16


def test_tokenizers_are_deterministic_and_reachable() -> None:
    assert build_tokenizer(5000) == build_tokenizer(5000)
    with pytest.raises(UsageError, match="expected at most"):
        build_tokenizer(10**7)


def test_text_survives_an_extended_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(build_tokenizer(8192), encoding="utf-8")
    tokenizer = Tokenizer(tmp_path)
    text = "And God said, Let there be light: and there was light. 北京 \N{GRINNING FACE} x = 1"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert all(tokenizer.token(token) for token in range(8192))


def test_empty_folder_is_filled_and_a_full_one_refused(tmp_path: Path) -> None:
    target = tmp_path / "model"
    target.mkdir()
    initialize(target, "release-config-only")
    with pytest.raises(UsageError, match="expected a new or empty folder, found something there"):
        initialize(target, "tiny")
    with pytest.raises(UsageError, match="expected a new or empty folder"):
        initialize(target / "config.json", "tiny")
    assert [file.name for file in target.iterdir()] == ["config.json"]


def test_arguments_that_cannot_be_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=f"preset 'huge': expected one of {', '.join(PRESETS)}"):
        initialize(tmp_path / "x", "huge")
    with pytest.raises(UsageError, match="seed -1: expected 0 or more"):
        initialize(tmp_path / "x", "tiny", seed=-1)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="expected a folder other than the current one"):
        initialize(".", "tiny")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_nothing_half_written_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException) -> None:
    def fail(*_: object, **__: object) -> None:
        raise failure

    monkeypatch.setattr(module, "save_file", fail)
    threads = torch.get_num_threads()
    if isinstance(failure, OSError):
        with pytest.raises(CheckpointError, match="model: cannot be written: No space left on device"):
            initialize(tmp_path / "model", "tiny")
    else:
        with pytest.raises(KeyboardInterrupt):
            initialize(tmp_path / "model", "tiny")
    assert list(tmp_path.iterdir()) == []
    assert torch.get_num_threads() == threads


def test_unwritable_parent(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match="cannot be written: "):
        initialize(tmp_path / "file" / "model", "tiny")


@given(st.integers(0, 2**32), st.integers(1, 70), st.integers(1, 3), st.floats(-60, 60))
@settings(max_examples=40, deadline=None)
def test_quantised_weights_are_near_and_stable(seed: int, rows: int, groups: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, 32 * groups, generator=generator) * 2.0**scale
    stored, scales = quantize_blocks(weight)
    back = dequantize(stored, scales)
    # e4m3 keeps 4 significant bits: half a unit in the last place is 2^-4 of the value, or of the smallest normal.
    smallest = scales.float().repeat_interleave(32, 0)[:rows].repeat_interleave(32, 1) * 2.0**-6
    assert ((back - weight).abs() <= torch.maximum(weight.abs(), smallest) * 2.0**-4).all()
    again = dequantize(*quantize_blocks(back))
    assert torch.equal(again, back)
    stored, scales = quantize_rows(weight, "fp4_e8m0_32")
    back = dequantize(stored, scales)
    step = scales.float().repeat_interleave(32, 1)
    # Between 4 and 6 the values are 2 apart, so an element is at most one scale away; below 2 a quarter of it.
    assert ((back - weight).abs() <= step).all()
    assert ((back - weight).abs()[weight.abs() <= 2 * step] <= 0.25 * step[weight.abs() <= 2 * step]).all()


def test_block_scales_cover_partial_blocks() -> None:
    weight = torch.full((33, 40), 3.0)
    weight[32, 39] = 1000.0
    stored, scales = quantize_blocks(weight)
    assert stored.shape == (33, 40)
    assert scales.float().tolist() == [[2.0**-7, 2.0**-7], [2.0**-7, 4.0]]
    assert dequantize(stored, scales)[0, 0] == 3.0
