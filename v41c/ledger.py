"""What each pass left behind, and what a compilation did, as people read it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from v41c.manifest import PassEntry
from v41c.quantization import quantization_text
from v41c.terminal import bytes_text, flops_text, table

if TYPE_CHECKING:
    from v41c.compile import CompileReport


def passes_table(
    passes: Sequence[PassEntry], seconds: Mapping[str, float] | None = None, peaks: Mapping[str, int] | None = None
) -> str:
    """The ledger: operations and costs of one decoded token after each pass.

    `peaks` are the bytes of activations that a chunk needs, `seconds` how long the passes took, both where known.
    """
    header = ["after", "operations", "launches", "arithmetic", "weights", "states", "activations"]
    rows = [
        [
            entry.name,
            str(entry.operations),
            str(entry.launches),
            flops_text(entry.flops),
            bytes_text(entry.weight_bytes),
            bytes_text(entry.state_bytes),
            bytes_text(entry.activation_bytes),
        ]
        for entry in passes
    ]
    if peaks:
        header.append("peak memory")
        rows = [[*row, bytes_text(peaks[row[0]])] for row in rows]
    if seconds:
        header.append("took")
        rows = [[*row, f"{seconds.get(row[0], 0.0):.2f} s"] for row in rows]
    return table(header, rows)


def compile_summary(report: CompileReport) -> str:
    """What a compilation did."""
    seconds = ", ".join(f"{name} {took:.1f}" for name, took in report.seconds.items())
    quantized = ["", quantization_text(report.quantization)] if report.quantization else []
    verified = [] if report.verification is None else ["", report.verification.summary()]
    return "\n".join(
        [
            passes_table(report.passes, report.pass_seconds),
            "",
            f"written     {report.engine} for {report.target}, {report.arithmetic} arithmetic",
            f"contents    {report.kernels} kernels, {bytes_text(report.weight_bytes)} of weights, at most "
            f"{bytes_text(max(report.arena_bytes.values()))} of activations",
            f"took        {sum(report.seconds.values()):.1f} s ({seconds})",
            *quantized,
            *verified,
        ]
    )
