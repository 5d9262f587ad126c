"""From a checkpoint to a graph: configuration, tensors, tokenizer, the eager model, and tracing into the IR.

`model = v41c.frontend.load(path)` gives the eager model, usable alone: `model(tokens)`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from v41c.frontend.model import Model


def load(path: str, arithmetic: str = "release") -> Model:
    """The eager model of a checkpoint folder; see `v41c.frontend.loading.load`."""
    from v41c.frontend.loading import load as load_model

    return load_model(path, arithmetic)
