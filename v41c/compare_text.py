"""The text of a comparison: a table per phase, a row per layer, the noise floor beside every figure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import TYPE_CHECKING

from v41c.terminal import table

if TYPE_CHECKING:
    from v41c.compare import CompareReport
    from v41c.difference import DivergenceRow, Error, IntegerRow, LogitsRow, Phase
    from v41c.verdict import Verdict

_CRITERIA = {1: "1 exact", 2: "2 forced", 3: "3 logits", 0: ""}


def report_text(report: CompareReport) -> str:
    """The report for people."""
    head = f"{report.engine}, {report.arithmetic} arithmetic, against {report.against}"
    parts = [head, *(_phase(phase) for phase in report.phases)]
    if report.quantized:
        parts.append(_quantized(report.quantized))
    if report.phases:
        parts.append(_ced(report))
    if report.verdicts:
        parts.append(_verdicts(report.verdicts))
    return "\n\n".join(parts)


def _phase(phase: Phase) -> str:
    title = f"{phase.name}: {phase.tokens} tokens; engine against eager | eager against itself in other groups"
    header = ("layer", "attn_out rel. L2", "ffn_out rel. L2", "out rel. L2", "out max", "out mean")
    by_name = {row.name: row for row in phase.tensors}
    rows = []
    for name in by_name:
        layer, _, kind = name.rpartition(".")
        if kind == "out":
            pairs = [
                by_name[f"{layer}.{part}"] for part in ("attn_out", "ffn_out", "out") if f"{layer}.{part}" in by_name
            ]
            out = by_name[name]
            cells = [_both(row.engine.relative_l2, row.floor.relative_l2) for row in pairs]
            cells += ["-"] * (3 - len(cells))
            cells.append(_both(out.engine.max_abs, out.floor.max_abs))
            cells.append(_both(out.engine.mean_abs, out.floor.mean_abs))
            rows.append((layer, *cells))
    lines = [title, table(header, rows)]
    if phase.logits is not None and phase.logits_floor is not None:
        lines.append(f"logits: {_logits(phase.logits)}")
        lines.append(f" floor: {_logits(phase.logits_floor)}")
    lines += _integers(phase.integers)
    return "\n".join(lines)


def _integers(rows: list[IntegerRow]) -> Iterator[str]:
    kinds = dict.fromkeys(row.name.rpartition(".")[2] for row in rows)
    for kind in kinds:
        of_kind = [row for row in rows if row.name.endswith(f".{kind}")]
        total = sum(row.rows for row in of_kind)
        engine, floor = sum(row.engine for row in of_kind), sum(row.floor for row in of_kind)
        yield f"{kind.replace('_', ' ')}: {engine} of {total} rows equal | floor {floor}"


def _quantized(rows: list[DivergenceRow]) -> str:
    """What quantised weights cost, token by token."""
    header = ("quantised weights against the model as stored", "tokens", "KL mean", "median", "worst, nats", "top-1")
    cells = [
        (
            f"{row.phase}: {row.subject}",
            str(len(row.kl_nats)),
            _number(statistics.fmean(row.kl_nats)),
            _number(statistics.median(row.kl_nats)),
            _number(max(row.kl_nats)),
            f"{row.top1_agreement:.3f}",
        )
        for row in rows
    ]
    return table(header, cells)


def _ced(report: CompareReport) -> str:
    if not report.ced:
        return f"ced against full prefill: not measured: {report.why_not_ced}"
    header = (
        "ced against full prefill",
        "last logits rel. L2",
        "KL, nats",
        "decoded after it rel. L2",
        "KL, nats",
        "top-1",
    )
    rows = [
        (
            f"{row.prompt_tokens} tokens",
            _number(row.prefill.error.relative_l2),
            _number(row.prefill.kl_nats),
            _number(row.decode.error.relative_l2),
            _number(row.decode.kl_nats),
            f"{row.decode.top1_agreement:.3f}",
        )
        for row in report.ced
    ]
    return table(header, rows)


def _verdicts(verdicts: list[Verdict]) -> str:
    """A row per run, subject and criterion; what failed or could not be compared is spelled out below."""
    groups: dict[tuple[str, str, int], list[Verdict]] = {}
    for verdict in verdicts:
        groups.setdefault((verdict.run, verdict.subject, verdict.criterion), []).append(verdict)
    header = ("run", "by", "criterion", "worst", "of allowed", "in", "integers", "")
    rows = [(*_group_head(group), *_group_cells(group)) for group in groups.values()]
    failed = [verdict for verdict in verdicts if verdict.passed is False]
    judged = sum(verdict.passed is not None for verdict in verdicts)
    lines = [table(header, rows), ""]
    lines += [f"FAIL {_place(v)}: {_number(v.figure)}, allowed {_number(v.limit)}, {v.where}" for v in failed]
    lines += [f"skip {_place(v)}: {v.note}" for v in verdicts if v.note]
    lines.append(f"{judged - len(failed)} of {judged} checks passed" if judged else "nothing could be compared")
    return "\n".join(lines)


def _group_head(group: list[Verdict]) -> tuple[str, str, str]:
    first = group[0]
    return first.run, first.subject.partition(",")[0], _CRITERIA[first.criterion]


def _group_cells(group: list[Verdict]) -> tuple[str, str, str, str, str]:
    """The tensor that comes closest to its limit, the rows of integers that are judged equal, and the outcome."""
    judged = [verdict for verdict in group if verdict.passed is not None]
    if not judged:
        return "-", "-", "-", "-", "skip"
    floats = [verdict for verdict in judged if verdict.unit != "rows"]
    counts = [verdict for verdict in judged if verdict.unit == "rows"]
    outcome = "pass" if all(verdict.passed for verdict in judged) else "FAIL"
    rows = sum(verdict.compared for verdict in counts)
    integers = f"{rows - sum(int(verdict.figure) for verdict in counts)} of {rows}" if counts else "-"
    if not floats:
        return "-", "-", "-", integers, outcome
    worst = max(floats, key=lambda verdict: verdict.figure / verdict.limit)
    return _number(worst.figure), _number(worst.limit), worst.where, integers, outcome


def _place(verdict: Verdict) -> str:
    return f"{verdict.run}, {verdict.subject}, criterion {verdict.criterion}, {verdict.kind}"


def _logits(row: LogitsRow) -> str:
    return f"{_error(row.error)}, KL {_number(row.kl_nats)} nats, top-1 equal {row.top1_agreement:.3f}"


def _error(error: Error) -> str:
    return f"rel. L2 {_number(error.relative_l2)}, max {_number(error.max_abs)}, mean {_number(error.mean_abs)}"


def _both(engine: float, floor: float) -> str:
    return f"{_number(engine)} | {_number(floor)}"


def _number(value: float) -> str:
    return f"{value:.2g}"
