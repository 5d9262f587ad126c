"""Golden tensors: what an independent implementation computed, read into one shape whichever folder it comes from.

Two kinds of folder are read. A case folder holds a random checkpoint, `io.safetensors` (release arithmetic) and
`io_exact.safetensors`: tensors `{run}.{phase}{what}` of several runs, phase `p.` the prefill of n
tokens, `d.` the decode of D more, `spec.` the draft block after each of those. The golden folder of a trained
checkpoint holds `golden.json` and a file per prompt. Here every tensor is named by the landmark it belongs to.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from v41c.errors import CheckpointError, UsageError
from v41c.golden_images import GoldenImage, read_images, with_images
from v41c.subject import STREAMS, Arithmetic, Array, Tokens

if TYPE_CHECKING:
    from v41c.frontend.config import ModelConfig

FILES: dict[Arithmetic, str] = {"release": "io.safetensors", "exact": "io_exact.safetensors"}
TRAINED_FILE = "golden.json"


@dataclass(frozen=True, eq=False)
class GoldenRun:
    """One sequence: its tokens [n + D], of which the first `prompt` = n are the prompt, and tensors by landmark.

    `prefill` has a row per prompt token, `decode` one per later token, `drafts` [D, B, …] the draft block after each of
    those. Besides landmarks there are `logits` in each, `layers.N.scores` (index scores), `layers.N.biased` (router
    scores with bias), and of drafts `inputs` [D], `ids` [D, B + 1] and `confidence` [D, B]. `layers.N.pool` is a mask
    over compressed rows; prefill logits may be those of the last rows only. `greedy` [D + 1] holds the tokens chosen
    after the prompt and after each decode step, where the model is trained. `images`: those whose spans stand in the
    prompt, which `tokens` holds in the first of their grids. A run with a reason in `skipped` is empty.
    """

    name: str
    tokens: Tokens = field(default_factory=lambda: np.empty(0, np.int64))
    prompt: int = 0
    prefill: Mapping[str, Array] = field(default_factory=dict)
    decode: Mapping[str, Array] = field(default_factory=dict)
    drafts: Mapping[str, Array] = field(default_factory=dict)
    greedy: Array | None = None
    images: tuple[GoldenImage, ...] = ()
    skipped: str = ""

    @property
    def steps(self) -> int:
        """Decode steps D."""
        return len(self.tokens) - self.prompt


def read_golden(folder: Path, config: ModelConfig, arithmetic: Arithmetic) -> list[GoldenRun]:
    """The runs of a golden folder in an arithmetic, empty when it holds none in it.

    UsageError for a folder that is neither kind, or that belongs to another model; CheckpointError for a damaged file.
    """
    trained = (folder / TRAINED_FILE).is_file()
    if not trained and not (folder / FILES["release"]).is_file():
        raise UsageError(
            f"{folder}: expected golden tensors ({FILES['release']} or {TRAINED_FILE}) in this folder, found neither"
        )
    if (trained and arithmetic == "exact") or not (trained or (folder / FILES[arithmetic]).is_file()):
        return []
    try:
        return _read_trained(folder, config) if trained else _read_case(folder, config, arithmetic)
    except (KeyError, IndexError, ValueError) as error:
        raise CheckpointError(f"{folder}: expected golden tensors of this model, found others: {error}") from error


def read_tensors(file: Path) -> dict[str, Array]:
    """Every tensor of a safetensors file, floats as f32; CheckpointError for a damaged one."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(file)
    except (SafetensorError, OSError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{file}: expected a complete safetensors file: {reason}") from error
    return {name: (t.float() if t.is_floating_point() else t).numpy() for name, t in tensors.items()}


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text(encoding="utf-8"))  # type: ignore[no-any-return]
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{file}: expected JSON: {error}") from error


def _read_case(folder: Path, config: ModelConfig, arithmetic: Arithmetic) -> list[GoldenRun]:
    tensors = read_tensors(folder / FILES[arithmetic])
    # ids are held once, beside the release tensors
    given = tensors if arithmetic == "release" else read_tensors(folder / FILES["release"])
    runs: list[GoldenRun] = []
    for name in sorted({key.partition(".")[0] for key in tensors}):
        ids = given.get(f"{name}.ids")
        logits = tensors.get(f"{name}.d.logits")
        if ids is None or logits is None:
            runs.append(GoldenRun(name, skipped="it has no ids or no decode logits"))
        else:
            steps, prompt = len(logits), ids.shape[1] - len(logits) - 1
            images: list[tuple[GoldenImage, ...]] = [()] * len(ids)
            shown = any(re.match(rf"{name}\.(image\d|token_types)", key) for key in given)
            if not shown and config.has_vision and (ids[:, :prompt] == config.image_token_id).any():
                runs.append(GoldenRun(name, skipped="its prompt holds images, and what they show was not recorded"))
                continue
            if shown:
                # what an image is may be held once as well, what the tower makes of it is each file's own
                patches = {key: tensor for key, tensor in given.items() if ".p." not in key}
                images = read_images(name, patches | tensors, ids[:, :prompt], config)
            for row in range(len(ids)):
                label = name if len(ids) == 1 else f"{name}[{row}]"
                reader = _CaseReader(config, tensors, name, row, len(ids), prompt, steps)
                runs.append(reader.run(label, ids[row, :-1], images[row]))
    return runs


@dataclass(frozen=True)
class _CaseReader:
    """Takes one sequence out of the tensors of a run with `batch` of them."""

    config: ModelConfig
    tensors: Mapping[str, Array]
    name: str
    row: int
    batch: int
    prompt: int
    steps: int

    def run(self, label: str, tokens: Array, images: tuple[GoldenImage, ...]) -> GoldenRun:
        phases: dict[str, dict[str, Array]] = {"p": {}, "d": {}, "spec": {}}
        for key, tensor in self.tensors.items():
            found = re.fullmatch(rf"{self.name}\.(p|d|spec)\.(.+)", key)
            if found is not None:
                phases[found[1]] |= self._landmarks(found[1], found[2], tensor)
        # all positions' logits may be left out; the last one's are always there
        phases["p"].setdefault("logits", self.tensors[f"{self.name}.p.logits"][self.row : self.row + 1])
        sequence = with_images(tokens, images) if images else tokens
        return GoldenRun(label, sequence, self.prompt, phases["p"], phases["d"], phases["spec"], images=images)

    def _landmarks(self, phase: str, what: str, tensor: Array) -> dict[str, Array]:
        """The tensors of this sequence that one tensor of a phase holds, by landmark."""
        layered = re.fullmatch(r"([LM])(\d+)\.(\w+)", what)
        if layered is not None:
            layer = f"{'layers' if layered[1] == 'L' else 'mtp'}.{layered[2]}"
            return self._layer(phase, layer, layered[3], tensor)
        if what == "engram_hash":
            rows = self._sequence(phase, tensor)
            return {f"layers.{n}.engram_rows": rows[:, i] for i, n in enumerate(self.config.engram_layer_ids)}
        if what == "logits" and phase == "p":
            return {}
        names = {"full_logits": "logits", "in_ids": "inputs"}
        kept = ("logits", "full_logits", "main_hidden", "in_ids", "ids", "confidence")
        return {names.get(what, what): self._sequence(phase, tensor)} if what in kept else {}

    def _layer(self, phase: str, layer: str, what: str, tensor: Array) -> dict[str, Array]:
        if what in STREAMS:
            return {f"{layer}.{what}": self._sequence(phase, tensor)}
        if what in ("gate_i", "gate_sb"):
            rows = self._flattened(phase, tensor)
            return {f"{layer}.experts": np.sort(rows, -1)} if what == "gate_i" else {f"{layer}.biased": rows}
        if what == "idx":
            selection = self._sequence(phase, tensor)
            missing = self.config.index_topk - selection.shape[-1]
            return {f"{layer}.selection": np.pad(selection, ((0, 0), (0, missing)), constant_values=-1)}
        names = {"idx_score": "scores", "cand": "pool"}
        return {f"{layer}.{names[what]}": self._sequence(phase, tensor)} if what in names else {}

    def _sequence(self, phase: str, tensor: Array) -> Array:
        """[B, n, …] → [n, …]; of decode [D, B, 1, …] or [D, B, V] → [D, …]; of drafts [D, B, …] → [D, …]."""
        rows: Array = tensor[self.row] if phase == "p" else tensor[:, self.row]
        return np.squeeze(rows, 1) if phase == "d" and rows.ndim > 2 else rows

    def _flattened(self, phase: str, tensor: Array) -> Array:
        """[B·n, k] → [n, k]; of decode [D, B, k] → [D, k]; of drafts [D, B·block, k] → [D, block, k]."""
        rows: Array
        if phase == "p":
            rows = tensor.reshape(self.batch, -1, tensor.shape[-1])[self.row]
            return rows
        rows = tensor.reshape(len(tensor), self.batch, -1, tensor.shape[-1])[:, self.row]
        return np.squeeze(rows, 1) if phase == "d" else rows


def _read_trained(folder: Path, config: ModelConfig) -> list[GoldenRun]:
    runs = []
    for prompt in _read_json(folder / TRAINED_FILE).get("prompts", []):
        file = folder / prompt["file"]
        tensors = read_tensors(file)
        if tensors["greedy_logits"].shape[1] != config.vocab_size:
            raise UsageError(
                f"{file}: expected logits of a model with {config.vocab_size} tokens, "
                f"got {tensors['greedy_logits'].shape[1]}: they are another model's"
            )
        inside = folder / f"{file.stem}_layers_bf16.safetensors"
        layers = _trained_layers(read_tensors(inside)) if inside.is_file() else {}
        runs.append(_trained_run(file.stem, tensors, layers, config))
    return runs


def _trained_run(name: str, tensors: Mapping[str, Array], layers: dict[str, Array], config: ModelConfig) -> GoldenRun:
    greedy, length = tensors["greedy_ids"], len(tensors["input_ids"])
    prefill, decode = {"logits": tensors["prefill_logits"]}, {"logits": tensors["greedy_logits"][1:]}
    for key, rows in tensors.items():
        phase, _, layer = key.partition("_topk.layer")
        if layer:
            padded = np.pad(rows, ((0, 0), (0, config.index_topk - rows.shape[1])), constant_values=-1)
            (prefill if phase == "prefill" else decode)[f"layers.{layer}.selection"] = padded
    for index, layer_id in enumerate(config.engram_layer_ids):
        rows = tensors["engram_ids"][:, index]
        prefill[f"layers.{layer_id}.engram_rows"] = rows[:length]
        decode[f"layers.{layer_id}.engram_rows"] = rows[length:]
    ids = tensors["dspark_ids"]
    drafts = {"inputs": ids[:, 0], "ids": ids, "logits": tensors["dspark_logits"]}
    drafts["confidence"] = tensors["dspark_confidence"]
    tokens = np.concatenate([tensors["input_ids"], greedy[:-1]])
    return GoldenRun(name, tokens, length, prefill | layers, decode, drafts, greedy)


def _trained_layers(tensors: Mapping[str, Array]) -> dict[str, Array]:
    names = {name: name for name in STREAMS} | {"stream_out": "out", "engram_out": "in", "expert_ids": "experts"}
    found: dict[str, Array] = {}
    for key, tensor in tensors.items():
        layered = re.fullmatch(r"(layers\.\d+)\.(\w+)", key)
        if layered is not None and layered[2] in names:
            name = names[layered[2]]
            found[f"{layered[1]}.{name}"] = np.sort(tensor, -1) if name == "experts" else tensor
    return found
