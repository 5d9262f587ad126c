"""What the pass `quantize` did to each weight: measured while an engine is written, kept in it, shown by `inspect`."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from v41c.manifest import QUANTIZATION_FILE
from v41c.terminal import table

if TYPE_CHECKING:
    from v41c.compile import Source
    from v41c.runtime.artifact import Engine

_NUMBERED = re.compile(r"^layers\.\d+\.|^mtp\.\d+\.|(?<=\.experts)\.\d+|\.weight$")
_WORST = 3


class QuantizedWeight(msgspec.Struct, frozen=True):
    """A weight of the checkpoint that was quantised: the format of its elements, and how near it stayed.

    `snr_db`: 10·log10(Σ w² / Σ (w − w')²) in dB, w' the stored value; None where no value changed, as in a tensor of
    zeros. `relative_error` is ‖w − w'‖ / ‖w‖.
    """

    name: str
    format: str
    snr_db: float | None
    relative_error: float

    @property
    def kind(self) -> str:
        """The name without the numbers of layer and expert."""
        return _NUMBERED.sub("", self.name)


def measured(source: Source) -> list[QuantizedWeight]:
    """Of every weight that was quantised while it was read, in the order of names."""
    from v41c.frontend.quantized_checkpoint import QuantizedCheckpoint

    checkpoint = source.checkpoint
    if not isinstance(checkpoint, QuantizedCheckpoint):
        return []
    return [
        QuantizedWeight(
            name,
            "fp4" if checkpoint.spec(name).dtype == "I8" else "fp8",
            None if found.snr_db is None else round(found.snr_db, 2),
            float(f"{found.relative_error:.3g}"),
        )
        for name, found in sorted(checkpoint.fidelity.items())
    ]


def write_quantization(folder: Path, weights: Sequence[QuantizedWeight]) -> None:
    """The engine's file about them, one weight a line; none without any."""
    if weights:
        lines = b",\n".join(map(msgspec.json.encode, weights))
        (folder / QUANTIZATION_FILE).write_bytes(b"[\n" + lines + b"\n]\n")


def read_quantization(engine: Engine) -> list[QuantizedWeight]:
    """What the file of a loaded engine says; nothing where no weight was quantised."""
    if not is_quantized(engine):
        return []
    return msgspec.json.decode((engine.path / QUANTIZATION_FILE).read_bytes(), type=list[QuantizedWeight])


def is_quantized(engine: Engine) -> bool:
    """Whether the engine computes with other weights than its checkpoint holds."""
    return QUANTIZATION_FILE in engine.manifest.files


def quantization_text(weights: Sequence[QuantizedWeight]) -> str:
    """A row per kind of weight, and the weights that changed most."""
    kinds: dict[tuple[str, str], list[QuantizedWeight]] = {}
    for weight in weights:
        kinds.setdefault((weight.kind, weight.format), []).append(weight)
    rows = [
        (
            kind,
            format,
            str(len(group)),
            _decibels(min(map(_snr, group))),
            _decibels(statistics.median_low(map(_snr, group))),
            f"{max(weight.relative_error for weight in group):.2g}",
        )
        for (kind, format), group in kinds.items()
    ]
    header = ("quantised", "format", "weights", "worst SNR", "median SNR", "worst rel. error")
    worst = sorted((weight for weight in weights if weight.snr_db is not None), key=_snr)[:_WORST]
    listed = ", ".join(f"{weight.name} {_decibels(_snr(weight))}" for weight in worst)
    return table(header, rows) + (f"\nworst: {listed}" if listed else "")


def _snr(weight: QuantizedWeight) -> float:
    return float("inf") if weight.snr_db is None else weight.snr_db


def _decibels(snr: float) -> str:
    return "exact" if snr == float("inf") else f"{snr:.1f} dB"
