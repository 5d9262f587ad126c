"""Verdicts: what a criterion found, kind of tensor by kind of tensor, with the worst figure of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from v41c.subject import Array


@dataclass(frozen=True)
class Verdict:
    """One criterion on one kind of tensor of one run.

    Unit "relative L2": `figure` is the worst of `compared` tensors, found at `where`. Unit "rows": it is how many of
    `compared` rows differ for no accepted reason, the most of them at `where`. `limit` is what is allowed. `passed` is
    None where nothing could be compared, and `note` says why.
    """

    subject: str
    run: str
    criterion: int
    kind: str
    unit: Literal["relative L2", "rows"]
    figure: float
    limit: float
    where: str
    compared: int
    passed: bool | None
    note: str = ""


@dataclass
class Row:
    """A verdict in the making: `worst` is the figure at `where`; the subject does not show the tensors in `unseen`."""

    unit: Literal["relative L2", "rows"]
    figure: float = 0.0
    limit: float = 0.0
    worst: float = 0.0
    where: str = ""
    compared: int = 0
    passed: bool = True
    unseen: list[str] = field(default_factory=list)


class Tally:
    """Verdicts of one criterion on one run, one per kind of tensor with the worst figure of all of that kind."""

    def __init__(self, subject: str, run: str, criterion: int) -> None:
        self._labels = (subject, run, criterion)
        self._kinds: dict[str, Row] = {}

    def figure(self, kind: str, where: str, figure: float, limit: float, compared: int = 1) -> None:
        """A figure that must not be above its limit; NaN is."""
        entry = self._kinds.setdefault(kind, Row("relative L2", limit=limit))
        entry.compared += compared
        # a comparison that is false for NaN
        if not figure <= entry.worst or not entry.where:
            entry.figure = entry.worst = figure
            entry.where = where
        entry.passed = entry.passed and figure <= limit

    def floats(
        self, kind: str, where: str, found: Array | None, wanted: Array, limit: float, rows: Array | None = None
    ) -> None:
        """Relative L2 of a tensor, over some of its leading rows; of the last ones when there are more than wanted."""
        if found is None:
            self._kinds.setdefault(kind, Row("relative L2", limit=limit)).unseen.append(where)
            return
        found = found[-len(wanted) :]
        if rows is not None:
            found, wanted = found[rows], wanted[rows]
        self.figure(kind, where, relative_l2(found, wanted), limit)

    def rows(
        self,
        kind: str,
        where: str,
        found: Array | None,
        wanted: Array,
        differ: Callable[[Array, Array], Array],
        share: float = 0.0,
    ) -> None:
        """How many rows differ, at most a share of them."""
        entry = self._kinds.setdefault(kind, Row("rows"))
        if found is None:
            entry.unseen.append(where)
            return
        different = differ(found, wanted)
        count = int(different.sum())
        # one row is always within a share: there may be fewer than five
        limit = max(1, int(share * different.size)) if share else 0
        if count > entry.worst or not entry.where:
            entry.worst, entry.where = count, where
        entry.figure += count
        entry.limit += limit
        entry.compared += different.size
        entry.passed = entry.passed and count <= limit

    def verdicts(self) -> list[Verdict]:
        """One per kind, in the order in which they came."""
        return [
            Verdict(
                *self._labels,
                kind,
                entry.unit,
                entry.figure,
                entry.limit,
                entry.where,
                entry.compared,
                entry.passed if entry.compared else None,
                f"not shown by it: {', '.join(entry.unseen)}" if entry.unseen else "",
            )
            for kind, entry in self._kinds.items()
        ]


def skipped(subject: str, run: str, why: str) -> Verdict:
    """The verdict on what cannot be compared at all."""
    return Verdict(subject, run, 0, "everything", "rows", 0.0, 0.0, "", 0, None, why)


def unjudged(verdict: Verdict) -> Verdict:
    """The same figures of a subject with quantised weights, which tensors of the unquantised model cannot judge."""
    figure = f"{verdict.unit} {verdict.figure:.2g} ({verdict.limit:.2g} without), {verdict.where}"
    note = f"shown, not judged: weights are quantised; {figure}" if verdict.compared else verdict.note
    return replace(verdict, passed=None, note=note)


def relative_l2(found: Array, wanted: Array) -> float:
    """‖found − wanted‖ / ‖wanted‖ in f64: 0 for equal tensors, infinite where only the wanted one is zero."""
    difference = float(np.linalg.norm((found.astype(np.float64) - wanted.astype(np.float64)).ravel()))
    if difference == 0:
        return 0.0
    size = float(np.linalg.norm(wanted.astype(np.float64).ravel()))
    return difference / size if size else np.inf
