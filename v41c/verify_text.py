"""Verification as people read it."""

from __future__ import annotations

from collections.abc import Iterator

from v41c.terminal import bytes_text, table
from v41c.verify import PassVerdict, VerifyReport

_HEADER = ("pass", "numbers", "compared", "differ", "worst rel. L2", "logits rel. L2", "max", "KL", "integer rows")


def report_text(report: VerifyReport) -> str:
    """A row for every pass, then where what moved first shows."""
    return "\n".join(_lines(report))


def _lines(report: VerifyReport) -> Iterator[str]:
    yield f"verified on {len(report.steps)} steps with {report.weights} weights: {'; '.join(report.steps)}"
    yield ""
    yield table(_HEADER, [_row(verdict) for verdict in report.passes])
    for verdict in report.passes:
        yield from _notes(verdict)


def _row(verdict: PassVerdict) -> tuple[str, ...]:
    if verdict.outcome == "unchanged":
        return (verdict.name, "same graphs", *["-"] * (len(_HEADER) - 2))
    numbers = verdict.outcome if verdict.passed or verdict.outcome != "moved" else "MOVED"
    logits = verdict.logits
    figures = ("-",) * 3
    if logits is not None:
        figures = tuple(f"{value:.2g}" for value in (logits.error.relative_l2, logits.error.max_abs, logits.kl_nats))  # type: ignore[assignment]
    changed = sum(each.changed for each in verdict.integers)
    total = sum(each.rows for each in verdict.integers)
    differ, worst = str(len(verdict.changes)), f"{verdict.relative_l2:.2g}"
    return (verdict.name, numbers, str(verdict.compared), differ, worst, *figures, f"{changed} of {total}")


def _notes(verdict: PassVerdict) -> Iterator[str]:
    if verdict.arena_bytes and verdict.name == "plan-memory":
        sizes = ", ".join(f"{name} {bytes_text(size)}" for name, size in verdict.arena_bytes.items())
        found = "no two values that live together overlap" if not verdict.overlaps else "OVERLAPS"
        yield f"\n{verdict.name}: run in arenas filled with NaN, {found}: {sizes}"
    yield from (f"  {text}" for text in verdict.overlaps[:8])
    if verdict.outcome not in ("moved", "within tolerance"):
        return
    right = f"it may: {verdict.why}" if verdict.passed else "it must be exact"
    if verdict.outcome == "within tolerance":
        right = f"within {verdict.allowed:g}: {verdict.why}"
    elif not verdict.passed and verdict.allowed:
        right = f"it may by {verdict.allowed:g}: {verdict.why}"
    yield f"\n{verdict.name}: {verdict.outcome}; {right}"
    for what, place in (("first value", verdict.first), ("first landmark", verdict.first_landmark)):
        if place is not None:
            yield f"  {what:15} {place}"
    if verdict.first_landmark is None:
        yield "  no landmark differs"
    changed = [each for each in verdict.integers if each.changed]
    if changed:
        rows = ", ".join(f"{each.kind} {each.changed} of {each.rows}" for each in changed)
        yield f"  integer rows    {rows}"
