"""Every token through the whole model: equals the reference forward.

Block-token evaluations: L·N.
"""

from __future__ import annotations

from collections.abc import Iterator

from v41c.runtime.artifact import Engine
from v41c.runtime.steps import Part, Plan, Run


def why_not(engine: Engine) -> str | None:
    """None: every engine can."""
    return None


def parts(run: Run, plan: Plan) -> Iterator[Part]:
    """All of it at once."""
    yield Part(run, plan.rows(run, run))
