"""One token per step through the whole model: how generation goes on."""

from __future__ import annotations

from dataclasses import replace

from v41c.runtime.artifact import Engine
from v41c.runtime.schedules import full
from v41c.runtime.steps import Floats, Plan, Run, Steps


def why_not(engine: Engine) -> str | None:
    """None: every engine can."""
    return None


def run(steps: Steps, run: Run, plan: Plan) -> Floats:
    """Logits f32 [1, V] of the last token, or [N, V] of every token."""
    return full.run(steps, run, replace(plan, chunk_tokens=1))
