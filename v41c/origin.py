"""Which checkpoint an engine was made of: an engine holds no path, so that equal inputs give equal bytes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from v41c.errors import UsageError
from v41c.runtime.artifact import Engine

if TYPE_CHECKING:
    from v41c.compile import Source


def checkpoint_of(engine: Engine, given: Path | None) -> Path:
    """The folder `given`, or the shipped checkpoint when it is the engine's model.

    UsageError when the configuration or an unpacked f32 weight is not the engine's; ConfigError or CheckpointError for
    a folder that is no checkpoint.
    """
    from v41c.frontend.config import parse_config, read_config
    from v41c.frontend.presets import TRAINED_CHECKPOINT

    path = TRAINED_CHECKPOINT if given is None else given
    same = read_config(path) == parse_config(engine.manifest.config, str(engine.path))
    if given is None and not (same and foreign_weight(engine, path) is None):
        raise UsageError(f"{engine.path}: it was not made of the shipped checkpoint: give its own with --checkpoint")
    if not same:
        raise UsageError(f"{path}: expected the checkpoint of {engine.path}, found another configuration")
    weight = foreign_weight(engine, path)
    if weight is not None:
        raise UsageError(f"{path}: {weight}: expected the weights that {engine.path} was made of, found others")
    return path


def source_of(engine: Engine, path: Path) -> Source:
    """The checkpoint of an engine, its weights as the engine's graphs type them."""
    from v41c.compile import quantized_source, read_source
    from v41c.passes import quantize

    source = read_source(path, no_weights=False)
    quantized = any(entry.name == quantize.NAME for entry in engine.manifest.passes)
    return quantized_source(source) if quantized else source


def foreign_weight(engine: Engine, path: Path) -> str | None:
    """Name of a weight that differs between an engine and a checkpoint, of those that engines hold as they are."""
    from v41c.codegen.artifact import PLAIN
    from v41c.frontend.checkpoint import Checkpoint

    engine.require_weights()
    checkpoint = Checkpoint(path)
    for weight in engine.manifest.weights:
        if weight.layout != PLAIN or weight.name not in checkpoint or checkpoint.spec(weight.name).dtype != "F32":
            continue
        ours = engine.weights[weight.offset : weight.offset + weight.size_bytes].view(np.float32)
        if not np.array_equal(ours, checkpoint.tensor(weight.name).numpy().ravel()):
            return weight.name
    return None
