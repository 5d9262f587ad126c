"""A small random model with a vision tower, and engines of it: as few different kernels as there can be."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.traced import GOLDEN
from v41c.compile import CompileOptions, compile
from v41c.frontend.config import parse_config
from v41c.frontend.initialize import write_weights
from v41c.frontend.model import Model
from v41c.frontend.vision import Patches
from v41c.runtime.images import Picture, Rules, make_picture
from v41c.runtime.states import as_float
from v41c.runtime.vision import ImagePrompt, tower_inputs
from v41c.subject import Arithmetic

IMAGE = 511
CONFIG = {
    **{"dtype": "bf16", "expert_dtype": None, "vocab_size": 512, "dim": 48, "moe_inter_dim": 32, "n_layers": 1},
    **{"n_heads": 2, "n_routed_experts": 3, "n_shared_experts": 1, "n_activated_experts": 1, "score_func": "sigmoid"},
    **{"route_scale": 1.5, "swiglu_limit": 10.0, "q_lora_rank": 32, "head_dim": 32, "rope_head_dim": 16},
    **{"norm_eps": 1e-20, "o_groups": 1, "o_lora_rank": 32, "window_size": 64, "compress_ratios": [0]},
    **{"rope_theta": 10000.0, "hc_mult": 2, "hc_sinkhorn_iters": 3, "hc_eps": 1e-6, "image_token_id": IMAGE},
    **{"vision_n_layers": 2, "vision_dim": 48, "vision_n_heads": 2, "vision_inter_dim": 40, "vision_patch_size": 14},
    **{"vision_rope_theta": 10000.0, "vision_downsample_ratio": 3, "vision_max_n_token": 40, "vision_min_pixels": 2000},
}
RULES = Rules(patch=14, merged=3, max_tokens=40, min_pixels=2000)


def checkpoint_and_engine(
    folder: Path, arithmetic: Arithmetic = "release", changes: Mapping[str, Any] | None = None
) -> tuple[Path, Path]:
    """The checkpoint of the model, with some changes to its configuration, and an engine for contexts of 256 tokens."""
    config = CONFIG | dict(changes or {})
    checkpoint, engine = folder / "checkpoint", folder / "engine"
    if not checkpoint.exists():
        checkpoint.mkdir()
        (checkpoint / "config.json").write_text(json.dumps(config))
        shutil.copyfile(GOLDEN / "case_00" / "tokenizer.json", checkpoint / "tokenizer.json")
        write_weights(checkpoint, parse_config(config), 3, lambda done, total: None)
    compile(checkpoint, engine, CompileOptions(arithmetic=arithmetic, max_context=256))
    return checkpoint, engine


def noise(seed: int, width: int, height: int) -> np.ndarray:
    """Pixels of an image."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def picture(seed: int, width: int, height: int) -> Picture:
    """An image of noise."""
    return make_picture(noise(seed, width, height), RULES)


def seen(model: Model, pictures: list[Picture]) -> Tensor:
    """What the eager model's tower makes of pictures, in the dtype of activations."""
    inputs = {name: torch.from_numpy(array) for name, array in tower_inputs(pictures).items()}
    inputs["patches"] = inputs["patches"].to(torch.float32 if model.arithmetic.name == "exact" else torch.bfloat16)
    with torch.inference_mode():
        return model.see(Patches(*inputs.values()))


def placed(model: Model, prompt: ImagePrompt) -> tuple[Tensor, Tensor]:
    """Codes and rows that the eager model is given for a prompt."""
    codes, count = np.full(len(prompt), -1, np.int32), 0
    for image in prompt.images:
        span = image.picture.grid.span()
        codes[image.begin : image.end] = np.where(span >= 0, span + count, span)
        count += image.picture.grid.merged_rows
    return torch.from_numpy(codes), seen(model, [image.picture for image in prompt.images])


def floats(rows: np.ndarray) -> np.ndarray:
    """Rows of an engine as f32: bf16 comes as bits."""
    return as_float(rows, "bf16" if rows.dtype == np.uint16 else "f32")
