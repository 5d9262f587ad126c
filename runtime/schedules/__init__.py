"""Ways to feed a run of tokens through the graphs: one file each, found by folder.

A schedule is a module with two functions: `why_not(engine)`, the reason why an engine cannot be run that way or None,
and `run(steps, run, plan)`, which feeds the run and returns logits f32 [rows, V]: of its last token, or with
`plan.all_logits` of every token that passed the decoder.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from typing import Protocol, cast

from v41c.errors import UsageError
from v41c.runtime.artifact import Engine
from v41c.runtime.steps import Floats, Plan, Run, Steps


class Schedule(Protocol):
    """What a module of this folder offers."""

    def why_not(self, engine: Engine) -> str | None:
        """The reason why the engine cannot be run this way, in one line."""

    def run(self, steps: Steps, run: Run, plan: Plan) -> Floats:
        """Feed the run; logits f32 [rows, V]."""


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
