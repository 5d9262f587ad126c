"""The driver of `v41c init`: a random checkpoint in release format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from v41c.terminal import bytes_text


@dataclass(frozen=True)
class InitReport:
    """What was written: the folder, its preset and seed, layers, width, and bytes of all files."""

    checkpoint: str
    preset: str
    seed: int
    layers: int
    width: int
    size_bytes: int

    def to_json(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        return asdict(self)

    def summary(self) -> str:
        """One line."""
        return (
            f"{self.checkpoint}: preset {self.preset}, seed {self.seed}: {self.layers} layers of width {self.width}, "
            f"{bytes_text(self.size_bytes)}"
        )


def init(
    directory: str | Path, preset: str, seed: int = 0, progress: Callable[[str], None] = lambda text: None
) -> InitReport:
    """Write a random checkpoint; the folder appears complete or not at all. UsageError or CheckpointError."""
    from v41c.frontend.initialize import initialize

    def show(done: int, total: int) -> None:
        progress(f"weights: {bytes_text(done)} of {bytes_text(total)}")

    progress("drawing weights")
    config = initialize(directory, preset, seed, show)
    size = sum(path.stat().st_size for path in Path(directory).iterdir())
    return InitReport(str(directory), preset, seed, config.n_layers, config.dim, size)
