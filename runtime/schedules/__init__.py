"""Ways to feed a run of tokens through the graphs: one file each, found by folder.

A schedule is a module with two functions: `why_not(engine)`, the reason why an engine cannot be run that way or None,
and `parts(run, plan)`, which lists what is to be done, in order. Steps take as much of a part as they have room for.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Iterator
from typing import Protocol, cast

from v41c.errors import UsageError
from v41c.runtime.artifact import Engine
from v41c.runtime.steps import Part, Plan, Run


class Schedule(Protocol):
    """What a module of this folder offers."""

    def why_not(self, engine: Engine) -> str | None:
        """The reason why the engine cannot be run this way, in one line."""

    def parts(self, run: Run, plan: Plan) -> Iterator[Part]:
        """What feeds the run. Rows are wanted of its last token, or with `plan.all_logits` of every decoded one."""


@functools.cache
def names() -> tuple[str, ...]:
    """Names of all schedules, sorted."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


@functools.cache
def find(name: str) -> Schedule:
    """The schedule of that name; UsageError when there is none."""
    if name not in names():
        raise UsageError(f"schedule: expected one of {', '.join(names())}, got {name!r}")
    return cast(Schedule, importlib.import_module(f"{__name__}.{name}"))
