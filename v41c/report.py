"""The driver of `v41c report`: figures of an engine, a checkpoint or a configuration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from v41c.figures import Figure, figures
from v41c.stages import Stages, stages_of

DEFAULT_CONTEXT = 1 << 20


@dataclass(frozen=True)
class Report:
    """Figures of one model. `kind` is engine, checkpoint or config; `context` is in tokens."""

    model: str
    kind: str
    context: int
    figures: tuple[Figure, ...]

    def to_json(self) -> dict[str, Any]:
        """The object that `--json` prints: every figure by its key, and `sources` by the same keys."""
        return {
            "model": self.model,
            "kind": self.kind,
            "context": self.context,
            **{figure.key: figure.value for figure in self.figures},
            "sources": {figure.key: figure.source for figure in self.figures},
        }

    def summary(self) -> str:
        """The same for people."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"{self.kind} {self.model}, prompts of {self.context} tokens"
        width = max(len(figure.title) for figure in self.figures)
        for figure in self.figures:
            value = f"{figure.value:,}" if isinstance(figure.value, int) else f"{figure.value:.3f}"
            yield ""
            yield f"{figure.title:<{width}}  {value} {figure.unit}".rstrip()
            yield f"  {figure.source}"


def report(model: str | Path, context: int | None = None) -> Report:
    """Figures of an engine from its graphs, or of a checkpoint or configuration by tracing it without its weights."""
    kind, stages = stages_of(Path(model))
    return stages_report(str(model), kind, stages, context or DEFAULT_CONTEXT)


def stages_report(model: str, kind: str, stages: Stages, context: int) -> Report:
    """Figures of a model whose stages are at hand."""
    return Report(model, kind, context, figures(stages, context))
