"""`v41c report`: the release's published figures, and that every figure follows the model it is asked about."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from v41c.errors import ConfigError
from v41c.frontend.presets import RELEASE_CONFIG, TRAINED_CHECKPOINT, flat_config, preset_named
from v41c.report import Report, report, stages_report
from v41c.runtime.artifact import load
from v41c.stages import Stages, engine_stages

ROOT = Path(__file__).parents[1]
EngineOf = Callable[[Path, str], Path]

#: five layers: window, full, reuse at ratio 2 and full, reindex at ratio 1 with a candidate pool
FIVE: dict[str, Any] = {
    "n_layers": 5,
    "n_mtp_layers": 0,
    "compress_ratios": [0, 2, 2, 1, 1],
    "kv_source_layers": [1, 3],
    "index_source_layers": [1, 3, 4],
    "candidate_source_layer": 3,
    "engram_layer_ids": [0],
}


@cache
def traced_release() -> Report:
    """Figures of the release, traced once."""
    return report(RELEASE_CONFIG, 100_000)


def release() -> Mapping[str, Any]:
    """The same as JSON."""
    return traced_release().to_json()


@pytest.fixture(scope="module")
def figures_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Mapping[str, Any]]:
    """Figures of FIVE with other values of some keys."""
    preset = preset_named("tiny")

    @cache
    def figures(**changes: Any) -> Mapping[str, Any]:
        flat = flat_config(preset, 1766) | FIVE | {key: _plain(value) for key, value in changes.items()}
        flat["engram_num_embeddings"] = flat["engram_num_embeddings"][:1]
        file = tmp_path_factory.mktemp("configs") / "config.json"
        file.write_text(json.dumps(flat))
        return report(file, 1000).to_json()

    return figures


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


@pytest.mark.parametrize(
    ("key", "least", "most"),
    [
        ("backbone_parameters", 551.5e9, 552.5e9),
        ("engram_parameters", 768_022_850 * 256, 768_022_850 * 256),
        ("active_parameters_encoder", 7.5e9, 8.3e9),
        ("active_parameters_total", 15.5e9, 16.5e9),
        ("global_state_bytes_per_token", 890, 890),
        ("global_state_bytes_per_token_unshared", 10_324, 10_324),
        ("window_state_bytes", 40 * 128 * 528, 40 * 128 * 528),
        ("boundary_values_unfused_per_d", 20, 20),
        ("boundary_values_fused_per_d", 10, 10),
        ("expert_bytes", 288.8e9 * 0.995, 288.8e9 * 1.005),
        ("engram_bytes", 202_758_032_400, 202_758_032_400),
        ("prefill_block_tokens", 20 * 100_000 + 20 * 128, 20 * 100_000 + 20 * 128),
        ("prefill_block_tokens_full", 40 * 100_000, 40 * 100_000),
        ("reindex_positions_per_query", 16_384, 16_384),
    ],
)
def test_the_release_s_published_figures(key: str, least: float, most: float) -> None:
    print(f"{key}: {release()[key]}")
    assert least <= release()[key] <= most
    assert release()["sources"][key]


def test_what_the_release_s_deployed_system_reports_is_reported() -> None:
    assert release()["decode_arithmetic_growth"] > 1
    assert "index scores" in release()["sources"]["decode_arithmetic_growth"]
    for use in ("decode", "prefill"):
        print(f"launches of a reuse-mode layer in {use}: {release()[f'launches_per_reuse_layer_{use}']}")
    assert 0 < release()["launches_per_reuse_layer_decode"] <= 12
    assert 0 < release()["launches_per_reuse_layer_prefill"] <= 16


@pytest.mark.parametrize("copies", [2, 3, 4])
def test_boundary_traffic_follows_the_residual_copies(figures_of: Callable[..., Any], copies: int) -> None:
    figures = figures_of(hc_mult=copies)
    assert figures["boundary_values_unfused_per_d"] == 4 * copies + 4
    assert figures["boundary_values_fused_per_d"] == 2 * copies + 2


@pytest.mark.parametrize(
    ("ratios", "sources", "rows", "unshared"),
    [
        ((0, 2, 2, 1, 1), (1, 3), 1 / 2 + 1, 2 / 2 + 2 / 1),
        ((0, 4, 4, 1, 1), (1, 3), 1 / 4 + 1, 2 / 4 + 2 / 1),
        ((0, 3, 3, 2, 2), (1, 3), 1 / 3 + 1 / 2, 2 / 3 + 2 / 2),
        ((0, 1, 1, 1, 1), (1, 3), 2, 4),
        ((0, 1, 1, 1, 1), (3,), None, None),
    ],
)
def test_global_state_follows_ratios_and_sources(
    figures_of: Callable[..., Any], ratios: tuple[int, ...], sources: tuple[int, ...], rows: float, unshared: float
) -> None:
    if rows is None:  # a layer that reads global rows before any source makes them
        with pytest.raises(ConfigError, match="kv_source_layers"):
            figures_of(compress_ratios=ratios, kv_source_layers=sources)
        return
    figures = figures_of(compress_ratios=ratios, kv_source_layers=sources)
    row_bytes = (64 // 2 + 64 // 16) + (32 // 2 + 32 // 32)  # 64-wide fp4 with e4m3 scales, 32-wide keys with e8m0
    assert figures["global_state_bytes_per_token"] == pytest.approx(row_bytes * rows, rel=1e-12)
    assert figures["global_state_bytes_per_token_unshared"] == pytest.approx(row_bytes * unshared, rel=1e-12)


def test_another_source_layer_moves_the_cut_and_the_state(figures_of: Callable[..., Any]) -> None:
    usual = figures_of()
    later = figures_of(compress_ratios=(0, 2, 2, 2, 1), kv_source_layers=(1, 4), index_source_layers=(1, 4),
                       candidate_source_layer=4)  # fmt: skip
    assert usual["prefill_block_tokens"] == 3 * 1000 + 2 * 32
    assert later["prefill_block_tokens"] == 4 * 1000 + 1 * 32
    assert usual["prefill_block_tokens_full"] == later["prefill_block_tokens_full"] == 5 * 1000
    assert usual["reindex_positions_per_query"] == 8 * 4
    assert later["reindex_positions_per_query"] == 0
    assert "no layer" in later["sources"]["reindex_positions_per_query"]


def test_an_engram_in_the_decoder_means_a_full_prefill(figures_of: Callable[..., Any]) -> None:
    figures = figures_of(engram_layer_ids=(3,))
    assert figures["prefill_block_tokens"] == figures["prefill_block_tokens_full"] == 5 * 1000
    assert "layers.3 has an Engram" in figures["sources"]["prefill_block_tokens"]


def test_the_candidate_pool_bounds_what_is_scored(figures_of: Callable[..., Any]) -> None:
    assert figures_of(candidate_topk_blocks=5, candidate_block_size=3)["reindex_positions_per_query"] == 15
    # without a pool every key of the context is scored
    assert figures_of(candidate_source_layer=-1)["reindex_positions_per_query"] == 1 << 20


def test_windows_experts_and_tables_follow_their_sizes(figures_of: Callable[..., Any]) -> None:
    usual, wide = figures_of(), figures_of(window_size=48, n_routed_experts=16)
    assert usual["window_state_bytes"] == 5 * 32 * (64 + 2)
    assert wide["window_state_bytes"] == 5 * 48 * (64 + 2)
    expert = 3 * 64 * 64
    assert usual["expert_bytes"] == 5 * 8 * expert * (1 / 2 + 1 / 32)
    assert wide["expert_bytes"] == 2 * usual["expert_bytes"]
    per_expert = expert + 64 + 1  # its three matrices, its row of the router and its bias
    assert wide["backbone_parameters"] - usual["backbone_parameters"] == 5 * 8 * per_expert
    # a token visits as many experts as before, but is scored against all
    assert wide["active_parameters_total"] - usual["active_parameters_total"] == 5 * 8 * (64 + 1)
    rows = usual["engram_parameters"] // 32
    assert usual["engram_bytes"] == rows * (32 + 1)
    assert usual["active_parameters_total"] < usual["backbone_parameters"]


def test_parameters_equal_the_tensors_of_the_checkpoint() -> None:
    from v41c.frontend.checkpoint import Checkpoint
    from v41c.frontend.config import read_config

    figures = report(TRAINED_CHECKPOINT).to_json()
    checkpoint = Checkpoint(TRAINED_CHECKPOINT)
    checkpoint.verify(read_config(TRAINED_CHECKPOINT))
    elements = {
        name: tensor.numel() * (2 if tensor.dtype.itemsize == 1 and "ffn.experts." in name else 1)
        for name in checkpoint
        if not name.startswith("mtp.") and not name.endswith(".scale")
        for tensor in (checkpoint.tensor(name),)
    }
    tables = sum(count for name, count in elements.items() if ".engram.embed." in name)
    assert figures["engram_parameters"] == tables
    assert figures["backbone_parameters"] == sum(elements.values()) - tables


def test_an_engine_reports_what_its_checkpoint_does_without_torch(engine_of: EngineOf) -> None:
    engine = engine_of(TRAINED_CHECKPOINT, "release")
    code = (
        "import sys\nfrom v41c.cli import main\ncode = main(sys.argv[1:])\n"
        "assert not {'torch', 'tvm', 'triton', 'onnx'} & set(sys.modules), 'a compiler was imported'\nsys.exit(code)"
    )
    command = [sys.executable, "-c", code, "report", str(engine), "--context", "1000", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    of_engine, of_model = json.loads(done.stdout), report(TRAINED_CHECKPOINT, 1000).to_json()
    assert of_engine["kind"] == "engine"
    assert of_model["kind"] == "checkpoint"
    differing = {key for key in of_model if of_model[key] != of_engine[key]}
    # kernels are selected for one token and for many only in an engine
    assert differing <= {"model", "kind", "sources", *(key for key in of_model if key.startswith("launches_"))}


def test_an_engine_that_is_not_cut_has_the_same_figures(engine_of: EngineOf) -> None:
    stages = engine_stages(load(engine_of(TRAINED_CHECKPOINT, "release")))
    whole = Stages({name: partial(stages.__getitem__, name) for name in ("trace", "remove-quantization")})
    cut, uncut = (stages_report("e", "engine", some, 1000).to_json() for some in (stages, whole))
    passes = {"decode_arithmetic_growth", "launches_per_reuse_layer_decode", "launches_per_reuse_layer_prefill"}
    assert {key for key in cut if cut[key] != uncut[key]} <= passes | {"sources"}
    assert uncut["launches_per_reuse_layer_decode"] > cut["launches_per_reuse_layer_decode"]
    # scores of whole contexts, masked afterwards
    assert uncut["decode_arithmetic_growth"] > cut["decode_arithmetic_growth"]


def test_exact_arithmetic_keeps_f32_states(engine_of: EngineOf) -> None:
    engine = engine_of(TRAINED_CHECKPOINT, "exact")
    exact, release = report(engine).to_json(), report(engine_of(TRAINED_CHECKPOINT, "release")).to_json()
    assert exact["window_state_bytes"] == 12 * 32 * 64 * 4
    assert exact["global_state_bytes_per_token"] == (64 + 32) * 4 * 2  # sources of ratios 2, 2 and 1
    for key in ("backbone_parameters", "active_parameters_total", "boundary_values_fused_per_d"):
        assert exact[key] == release[key]


def test_the_text_shows_every_figure_and_its_source() -> None:
    made = traced_release()
    text = made.summary()
    for figure in made.figures:
        assert figure.title in text
        assert figure.source in text
    assert "202,758,032,400" in text
