"""Random small models of the architecture: layer plans, ratios 1 to 4, sizes that are no powers of two."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from tests.rewinding import play
from v41c.compile import CompileOptions, compile, read_source
from v41c.frontend.config import parse_config
from v41c.frontend.engram import bucket_primes
from v41c.frontend.initialize import write_weights
from v41c.frontend.loading import load as load_model
from v41c.frontend.presets import TRAINED_CHECKPOINT
from v41c.interpreted import InterpretedSubject
from v41c.ir.graph import Module
from v41c.ir.text import parse_module
from v41c.passes import select_kernels
from v41c.runtime.artifact import Engine, load
from v41c.runtime.images import Grid, Picture, Rules
from v41c.runtime.session import Session
from v41c.runtime.vision import ImagePrompt, Placed
from v41c.subject import Arithmetic, EagerSubject, Notes, Tokens, unseen

VOCABULARY, COMPRESSED = 2048, 1766  # of the shipped tokenizer


def random_config(seed: int, most_layers: int = 6) -> dict[str, Any]:
    """A flat configuration that is consistent by construction, of two layers or more."""
    r = Random(seed)
    layers = r.randint(2, most_layers)
    ratios, sources, selectors = _plan(r, layers)
    heads = r.choice((1, 2, 3, 4, 8, 12))
    head_dim, dense = r.choice((32, 64, 96)), r.choice(("fp8", "fp8", "bf16"))
    experts, drafts = r.randint(2, 9), r.choice((0, 0, 1, 2))
    config: dict[str, Any] = {
        "dtype": dense,
        "expert_dtype": r.choice(("fp4", "fp8")) if dense == "fp8" else None,
        "vocab_size": VOCABULARY,
        "dim": r.choice((32, 64, 96, 160)),
        "moe_inter_dim": r.choice((32, 64, 96)),
        "n_layers": layers,
        "n_mtp_layers": drafts,
        "n_heads": heads,
        "n_routed_experts": experts,
        "n_shared_experts": 1,
        "n_activated_experts": r.randint(1, min(experts, 4)),
        "score_func": r.choice(("sqrtsoftplus", "sigmoid", "softmax")),
        "gate_temp": r.choice((1.0, 0.7)),
        "norm_topk_prob": r.random() < 0.7,
        "route_scale": 1.5,
        "swiglu_limit": r.choice((2.0, 10.0)),
        "q_lora_rank": r.choice((32, 64, 96)),
        "head_dim": head_dim,
        "rope_head_dim": r.choice([dims for dims in (8, 16, 32) if dims <= head_dim]),
        "norm_eps": 1e-20,
        "o_groups": r.choice([groups for groups in (1, 2, 3, 4) if heads % groups == 0]),
        "o_lora_rank": r.choice((32, 64)),
        "window_size": r.choice((3, 8, 16, 32)),
        "compress_ratios": ratios + [0] * drafts,
        "kv_source_layers": sources,
        "index_source_layers": selectors,
        "compress_rope_theta": 160000.0,
        "original_seq_len": r.choice((0, 64)),
        "rope_theta": 10000.0,
        "rope_factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "index_n_heads": r.choice((1, 3, 16, 20)),
        "index_head_dim": r.choice((32, 64)),
        "index_topk": r.choice((2, 5, 8, 16)),
        "hc_mult": r.choice((2, 3, 4)),
        "hc_sinkhorn_iters": r.choice((1, 5, 20)),
        "hc_eps": 1e-6,
        "image_token_id": 3,
    }
    if sources and r.random() < 0.6:
        config |= {"candidate_source_layer": sources[-1]}
        config |= {"candidate_topk_blocks": r.randint(1, 4), "candidate_block_size": r.choice((2, 3, 4))}
    if r.random() < 0.6:
        config |= _engram(r, layers)
    if drafts:
        config |= {
            "dspark_block_size": r.randint(1, 5),
            "dspark_noise_token_id": 4,
            "dspark_target_layer_ids": sorted(r.sample(range(layers), r.randint(1, min(3, layers)))),
            "dspark_markov_rank": r.choice((16, 32)),
            "dspark_n_routed_experts": r.choice((0, 3)),
            "dspark_n_activated_experts": r.choice((1, 2)),
        }
        config["window_size"] = max(config["window_size"], config["dspark_block_size"] + 1)
    return config


def _plan(r: Random, layers: int) -> tuple[list[int], list[int], list[int]]:
    """Ratios, KV sources and index sources: window layers first, then stretches that share a source."""
    window = layers if r.random() < 0.15 else r.randint(0, min(2, layers - 1))
    ratios, sources, selectors = [0] * window, [], []
    while len(ratios) < layers:
        first, length, ratio = len(ratios), r.randint(1, layers - len(ratios)), r.choice((1, 2, 3, 4))
        sources.append(first)
        selectors.append(first)
        selectors += [layer for layer in range(first + 1, first + length) if r.random() < 0.4]
        ratios += [ratio] * length
    return ratios, sources, selectors


def _engram(r: Random, layers: int) -> dict[str, Any]:
    chosen = sorted(r.sample(range(layers), r.randint(1, min(2, layers))))
    grams, heads = r.choice((2, 3, 4)), r.choice((1, 2))
    return {
        "engram_layer_ids": chosen,
        "engram_num_embeddings": [sum(primes) for primes in bucket_primes(len(chosen), grams - 1, heads, 200)],
        "engram_max_ngram_size": grams,
        "engram_vocab_size": 200,
        "engram_n_heads": heads,
        "engram_head_dim": 32,
        "engram_pad_id": 2,
        "engram_compressed_vocab_size": COMPRESSED,
    }


def random_vision(seed: int) -> dict[str, Any]:
    """Keys of a vision tower, of one layer or more."""
    r = Random(f"vision {seed}")
    heads, width = r.choice((1, 2, 3, 5)), r.choice((8, 12, 16, 32))
    return {
        "vision_n_layers": r.randint(1, 3),
        "vision_dim": heads * width,
        "vision_n_heads": heads,
        "vision_inter_dim": r.choice((24, 40, 64)),
        "vision_patch_size": r.choice((2, 5, 14)),
        "vision_rope_theta": r.choice((100.0, 10000.0)),
        "vision_downsample_ratio": r.randint(1, 4),
        "vision_max_n_token": r.randint(12, 36),
        "vision_min_pixels": r.choice((1, 3136)),
    }


def random_prompt(config: Mapping[str, Any], seed: int) -> Tokens:
    """Random tokens, and images among them where the model takes any: of any grid, cut into pieces anywhere."""
    draw = np.random.default_rng(seed)
    rules = Rules.of(config)
    if rules is None:
        return draw.integers(5, VOCABULARY, Random(seed).randint(20, 70))
    parts, images = [draw.integers(5, VOCABULARY, 1 + seed % 4)], []
    for _ in range(3):
        drawn = iter(lambda: Grid(*draw.integers(1, 5 * rules.merged, 2).tolist(), rules.merged), None)
        grid = next(grid for grid in drawn if grid.span_tokens <= rules.max_tokens)
        patches = draw.uniform(-1, 1, (grid.patches, 3 * rules.patch**2)).astype(np.float32)
        images.append(Placed(Picture(grid, patches, patches.tobytes()[:32]), sum(map(len, parts))))
        parts += [np.full(grid.span_tokens, config["image_token_id"])]
        parts += [draw.integers(5, VOCABULARY, int(draw.integers(0, 6)))]
    return ImagePrompt(np.concatenate(parts).astype(np.int32), images)


def write_random_model(folder: Path, seed: int, most_layers: int = 6, *, vision: bool = False) -> dict[str, Any]:
    """A checkpoint folder of a random configuration with random weights; the configuration."""
    flat = random_config(seed, most_layers) | (random_vision(seed) if vision else {})
    (folder / "config.json").write_text(json.dumps(flat))
    shutil.copyfile(TRAINED_CHECKPOINT / "tokenizer.json", folder / "tokenizer.json")
    write_weights(folder, parse_config(flat, f"random model {seed}"), seed, lambda done, total: None)

    return flat


@dataclass(frozen=True)
class Outcome:
    """How an engine of a random model did on random tokens.

    `relative` and `median`: distance of its logits to the eager model's, of all together and of a token. `drafts`: the
    largest distance of draft logits to the interpreter's, relative to their norm. `interpreted`: whether the graphs
    that kernels are selected for give the eager model's logits to the last bit. `taken_back`: whether verified tokens
    leave no trace once they are taken back; so it is without a draft head, when none can be verified.
    """

    relative: float
    median: float
    drafts: float
    interpreted: bool
    same_in_one_piece: bool
    finite: bool
    taken_back: bool


def run_random_model(folder: Path, seed: int, arithmetic: Arithmetic, passes: str) -> Outcome:
    """Compile, feed random tokens in random pieces over poisoned memory, compare with interpreter and eager model."""
    options = CompileOptions(arithmetic=arithmetic, max_context=128, passes=passes)
    compile(folder, folder / "engine", options)
    engine = load(folder / "engine")
    tokens, r = random_prompt(engine.manifest.config, seed), Random(seed + 1)
    drafting = bool(engine.programs("draft"))
    session = Session(engine, poison=True, drafting=drafting)
    found = np.concatenate([session.prefill_all(piece, mode="full", chunk=64) for piece in _pieces(tokens, r)])
    whole = Session(engine).prefill_all(tokens, mode="full", chunk=64)
    interpreter = InterpretedSubject(read_source(folder, no_weights=False), _last_graphs(engine.path), arithmetic)
    interpreter.start(len(tokens) + 8)
    interpreted = interpreter.feed(tokens, Notes())
    eager = EagerSubject(load_model(folder, arithmetic))
    eager.start(len(tokens))
    wanted = eager.feed(tokens, unseen)
    drafts = 0.0
    if drafting:
        theirs = interpreter.draft(int(tokens[0]), Notes()).logits
        drafts = _distance(session.draft({0: int(tokens[0])}, logits=True)[0].logits, theirs)
    errors = np.linalg.norm(found - wanted, axis=1) / np.linalg.norm(wanted, axis=1)
    return Outcome(
        relative=_distance(found, wanted),
        median=float(np.median(errors)),
        drafts=drafts,
        interpreted=np.array_equal(interpreted, wanted),
        same_in_one_piece=np.array_equal(found, whole),
        finite=bool(np.isfinite(found).all()),
        taken_back=not drafting or _leaves_no_trace(engine, seed),
    )


def _leaves_no_trace(engine: Engine, seed: int) -> bool:
    session, plain = (Session(engine, slots=2, drafting=True, poison=True) for _ in range(2))
    return not any(play(session, plain, seed, rounds=16, longest_prompt=6))


def _distance(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def _last_graphs(engine: Path) -> Module:
    """The graphs of an engine as they stood before kernels were selected."""
    texts = sorted((engine / "graphs").iterdir())
    (selected,) = (place for place, text in enumerate(texts) if text.stem.endswith(select_kernels.NAME))
    return parse_module(texts[selected - 1].read_text())


def _pieces(tokens: Tokens, r: Random) -> Iterator[Tokens]:
    begin = 0
    while begin < len(tokens):
        length = r.choice((1, 2, 3, 7, 16, 40))
        yield tokens[begin : begin + length]
        begin += length
