"""One token per step through the whole model: how generation goes on."""

from __future__ import annotations

from collections.abc import Iterator

from v41c.runtime.artifact import Engine
from v41c.runtime.steps import Part, Plan, Run


def why_not(engine: Engine) -> str | None:
    """None: every engine can."""
    return None


def parts(run: Run, plan: Plan) -> Iterator[Part]:
    """Each token by itself."""
    for position in range(run.start, run.end):
        token = run.part(position, position + 1)
        yield Part(token, plan.rows(token, run))
