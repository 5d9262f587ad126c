"""What `tools/gpu_check.py` prints: tables of steps and of measurements."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from v41c.terminal import table

if TYPE_CHECKING:
    from tools.gpu_check import Check

Line = dict[str, Any]
HEADER = (
    *("kernel", "tokens", "calls", "us", "spread", "GB/s", "of copy", "Tflop/s", "of product"),
    *("least us", "eager us", "compile us", "apart"),
)


def bench_lines(text: str) -> list[Line]:
    """The lines of a bench: ceilings, and kernels with what torch.compile makes of their references."""
    found: dict[object, Line] = {}
    for content in text.splitlines():
        try:
            line: Line = json.loads(content)
        except json.JSONDecodeError:  # the bench was ended while it wrote
            continue
        key = line["kind"] if line["kind"] == "ceilings" else (line["symbol"], line["tokens"])
        found[key] = found.get(key, {}) | line | ({"kind": "kernel"} if line["kind"] == "compile" else {})
    return list(found.values())


def report_text(check: Check) -> str:
    """Everything for people."""
    steps = [(one.step, one.status, f"{one.seconds:.0f} s", one.detail) for one in check.outcomes]
    width = max(len(row[3]) for row in steps)
    parts = [table(("step", "status", "took", "what it says"), [(*row[:3], row[3].ljust(width)) for row in steps])]
    ceilings = next((line for line in check.bench if line["kind"] == "ceilings"), None)
    kernels = [line for line in check.bench if line["kind"] == "kernel"]
    if ceilings is not None:
        parts += bench_parts(ceilings, kernels)
    return "\n\n".join(parts)


def bench_parts(ceilings: Mapping[str, Any], kernels: Sequence[Line]) -> Iterator[str]:
    """What this GPU can do, the table of kernels, the sums of steps, and notes."""
    yield (
        f"a copy reads and writes {ceilings['copy_bytes_per_second'] / 1e12:.2f} TB/s, a bf16 product makes "
        f"{ceilings['bf16_flops_per_second'] / 1e12:.0f} Tflop/s; least us: the operation's bytes at the "
        f"{ceilings['sheet_bytes_per_second'] / 1e12:.2f} TB/s of a {ceilings['product']}"
    )
    measured = [line for line in kernels if "seconds" in line]
    yield table(HEADER, [cells(line, ceilings) for line in measured])
    sums = [*boundaries(measured, ceilings), *step_sums(kernels)]
    if sums:
        yield "\n".join(sums)
    notes = [note for line in kernels for note in notes_of(line)]
    if notes:
        yield "\n".join(dict.fromkeys(notes))


def cells(line: Line, ceilings: Mapping[str, Any]) -> tuple[str, ...]:
    """A row of the table."""
    bandwidth, arithmetic = line["bytes_per_second"], line["flops_per_second"]
    return (
        line["name"],
        str(line["tokens"]),
        str(line["calls"]),
        microseconds(line["seconds"]),
        f"{line['spread']:.0%}",
        f"{bandwidth / 1e9:.0f}",
        f"{bandwidth / ceilings['copy_bytes_per_second']:.0%}",
        f"{arithmetic / 1e12:.2f}",
        f"{arithmetic / ceilings['bf16_flops_per_second']:.0%}",
        microseconds(line["bytes"] / ceilings["sheet_bytes_per_second"]),
        microseconds(line.get("eager_seconds")),
        microseconds(line.get("compile_seconds")),
        "" if line.get("apart") is None else f"{line['apart']:.1e}",
    )


def microseconds(seconds: float | None) -> str:
    """Three digits, nothing for nothing."""
    return "" if seconds is None else f"{seconds * 1e6:.3g}" if seconds < 1e-3 else f"{seconds * 1e6:.0f}"


def boundaries(measured: Sequence[Line], ceilings: Mapping[str, Any]) -> Iterator[str]:
    """Residual boundaries against the traffic that none can do without."""
    for line in measured:
        if "least_bytes" in line:
            least = line["least_bytes"]
            yield (
                f"a residual boundary of {line['tokens']} tokens takes {microseconds(line['seconds'])} us; (2n + 2) d "
                f"values a token and the weight take {microseconds(least / ceilings['sheet_bytes_per_second'])} us by "
                f"the data sheet, {microseconds(least / ceilings['copy_bytes_per_second'])} us as fast as a copy"
            )


def step_sums(kernels: Sequence[Line]) -> Iterator[str]:
    """Kernels' time of a whole step, where every kernel of it was measured."""
    for tokens in dict.fromkeys(line["tokens"] for line in kernels):
        step = [line for line in kernels if line["tokens"] == tokens]
        calls = sum(line["calls"] for line in step)
        if len(step) > 1 and all("seconds" in line for line in step):
            seconds = sum(line["calls"] * line["seconds"] for line in step)
            yield f"a step of {tokens} tokens: {calls} kernels take {seconds * 1e3:.2f} ms one by one"


def notes_of(line: Line) -> Iterator[str]:
    """Why something of a kernel is not there."""
    where = f"{line['name']}, {line['tokens']} tokens"
    if "error" in line:
        yield f"{where}: {'wrong' if 'seconds' in line else 'not measured'}: {line['error']}"
    if line.get("why_not_eager"):
        yield f"{where}: eager: {line['why_not_eager']}"
    if line.get("why_not_compile"):
        yield f"{where}: torch.compile: {line['why_not_compile']}"
