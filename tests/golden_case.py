"""A golden case with images, made of what the eager model computes: as folders of other implementations name things."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from v41c.frontend import load
from v41c.runtime.images import Grid, Picture
from v41c.runtime.vision import ImagePrompt, Placed
from v41c.subject import STREAMS, Arithmetic, EagerSubject, Notes

CASE = Path(__file__).parent / "data" / "golden" / "case_00"
IMAGE, STEPS = 511, 3
#: two images in patches: 20 of them may lie in 4 x 5 as well, 21 in no other way
GRIDS = (Grid(5, 4, 3), Grid(3, 7, 3))
TYPES = {-2: 0, -3: 2, -4: 3}


def prompt(seed: int) -> ImagePrompt:
    """Text, an image, text, another image, text."""
    draw = np.random.default_rng(seed)
    parts, images, length = [], [], 0
    for grid in (*GRIDS, None):
        text = draw.integers(5, 500, 7)
        parts.append(text)
        length += len(text)
        if grid is not None:
            values = draw.uniform(-1, 1, (grid.patches, 3 * 14 * 14)).astype(np.float32)
            values = torch.from_numpy(values).bfloat16().float().numpy()
            images.append(Placed(Picture(grid, values, b""), length))
            parts.append(np.full(grid.span_tokens, IMAGE))
            length += grid.span_tokens
    return ImagePrompt(np.concatenate(parts).astype(np.int32), images)


def write_case(folder: Path) -> Path:
    """The folder: a checkpoint and what the eager model makes of one run in both arithmetics."""
    folder.mkdir()
    for name in ("config.json", "hf_config.json", "tokenizer.json", "model.safetensors"):
        shutil.copyfile(CASE / name, folder / name)
    given = prompt(3)
    ids, release = computed(given, "release", None)
    _, exact = computed(given, "exact", ids)
    types = np.full(len(given), -1)
    for number, image in enumerate(given.images):
        span = image.picture.grid.span()
        types[image.begin : image.end] = [TYPES.get(code, 1) for code in span.tolist()]
        patches = torch.from_numpy(image.picture.patches)
        release[f"r0.image{number}.patches"] = patches.view(-1, 3, 14, 14).bfloat16()
        release[f"r0.image{number}.types"] = torch.from_numpy(types[image.begin : image.end].copy())
    release["r0.token_types"] = torch.from_numpy(types)[None]
    release["r0.ids"] = torch.from_numpy(ids)[None]
    save_file(release, folder / "io.safetensors")
    save_file(exact, folder / "io_exact.safetensors")
    return folder


def computed(given: ImagePrompt, arithmetic: Arithmetic, ids: np.ndarray | None) -> tuple[np.ndarray, dict]:
    """Tokens [n + D + 1], greedy ones where none are given, and the tensors of the run."""
    subject = EagerSubject(load(str(CASE), arithmetic))
    tensors: dict[str, torch.Tensor] = {}
    subject.start(len(given) + STEPS + 1)
    for number, image in enumerate(given.images):
        notes = Notes()
        subject.see(image.picture, notes)
        for name, what in (("vit_out", "vit_out"), ("features", "aligner_out")):
            tensors[f"r0.p.{what}.{number}"] = torch.from_numpy(notes.values[name])
    notes = Notes()
    logits = subject.feed(given, notes)
    tensors |= {"r0.p.full_logits": torch.from_numpy(logits)[None], "r0.p.logits": torch.from_numpy(logits[-1:])}
    tensors |= phase("p", {name: rows[None] for name, rows in notes.values.items()})
    tokens, steps = [int(logits[-1].argmax())], []
    for step in range(STEPS):
        token = tokens[-1] if ids is None else int(ids[len(given) + step])
        notes, drafted = Notes(), Notes()
        row = subject.decode(token, notes)
        tokens.append(int(row.argmax()))
        following = tokens[-1] if ids is None else int(ids[len(given) + step + 1])
        block = subject.draft(following, drafted)
        made = {f"d.{name}": rows[None] for name, rows in notes.values.items() if len(rows)}
        made |= {f"spec.{name}": rows[None] for name, rows in drafted.values.items()}
        made |= {"d.logits": row[None], "spec.in_ids": np.array([following]), "spec.logits": block.logits[None]}
        made |= {"spec.ids": np.append(following, block.drafts)[None], "spec.confidence": block.confidence[None]}
        steps.append(made)
    stacked = {name: np.stack([made[name] for made in steps]) for name in steps[0]}
    for part in ("d", "spec"):
        tensors |= phase(part, {n.removeprefix(f"{part}."): rows for n, rows in stacked.items() if n.startswith(part)})
    return np.concatenate([given.tokens, tokens]), {name: tensor.contiguous() for name, tensor in tensors.items()}


def phase(part: str, values: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """Landmarks of a phase under their golden names."""
    found = {}
    hashes = [values[f"layers.{layer}.engram_rows"] for layer in (1, 3) if f"layers.{layer}.engram_rows" in values]
    if hashes:
        found[f"r0.{part}.engram_hash"] = torch.from_numpy(np.stack(hashes, -2))
    for name, rows in values.items():
        kind, _, layer = name.rpartition(".")[2], *name.partition(".")[1:]
        label = f"{'L' if name.startswith('layers') else 'M'}{layer.partition('.')[0]}"
        if kind == "in" and label not in ("L0", "L1", "L3"):
            continue  # what left the layer below
        if kind in STREAMS:
            found[f"r0.{part}.{label}.{kind}"] = torch.from_numpy(rows)
        elif kind == "experts":
            flat = rows.reshape(-1, rows.shape[-1]) if part == "p" else rows.reshape(len(rows), -1, rows.shape[-1])
            found[f"r0.{part}.{label}.gate_i"] = torch.from_numpy(flat)
        elif kind == "selection":
            found[f"r0.{part}.{label}.idx"] = torch.from_numpy(rows)
        elif kind in ("main_hidden", "logits", "in_ids", "ids", "confidence") and kind == name:
            found[f"r0.{part}.{name}"] = torch.from_numpy(rows)
    return found
