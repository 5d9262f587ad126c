"""An ablation drawn: how much slower decode and prefill are without each pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from v41c.errors import UnsupportedError, UsageError

if TYPE_CHECKING:
    from v41c.ablate import AblateReport

_SUFFIXES = (".png", ".svg")


def drawing(file: Path) -> Callable[[AblateReport], None]:
    """A function that draws a report to `file`; UsageError or UnsupportedError, at once, where it could not."""
    if file.suffix not in _SUFFIXES:
        raise UsageError(f"--plot: expected a file that ends in {' or '.join(_SUFFIXES)}, got {file}")
    if not file.absolute().parent.is_dir():
        raise UsageError(f"--plot: {file.parent}: expected a folder, found none")
    try:
        import matplotlib
    except ImportError as error:
        raise UnsupportedError("--plot: expected matplotlib, found none: pip install matplotlib") from error
    matplotlib.use("agg")
    return lambda report: _draw(report, file)


def _draw(report: AblateReport, file: Path) -> None:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from v41c.ablate import FULL, PHASES

    variants = [variant for variant in report.variants if variant.name != FULL]
    height = 0.8 / len(PHASES)
    # names instead of random ids, and no date: equal reports give equal files
    with rc_context({"svg.hashsalt": "v41c"}):
        figure = Figure(figsize=(8, 1.5 + 0.5 * len(variants)), layout="constrained")
        axes = figure.subplots()
        for number, phase in enumerate(PHASES):
            ratios = [variant.ratios[phase] for variant in variants]
            places = [row + number * height for row in range(len(variants))]
            below = [[ratio.median - ratio.low for ratio in ratios], [ratio.high - ratio.median for ratio in ratios]]
            axes.barh(places, [ratio.median - 1 for ratio in ratios], height, left=1, xerr=below, label=phase)
        axes.set_yticks([row + height / 2 for row in range(len(variants))], [variant.name for variant in variants])
        axes.invert_yaxis()
        axes.axvline(1, color="black", linewidth=0.8)
        axes.set_xlabel("time without the pass / time with every pass (bars: quartiles of the rounds)")
        axes.set_title(f"{Path(report.checkpoint).name}, {report.target}, context {report.options.context}")
        axes.legend()
        figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
