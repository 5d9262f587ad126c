"""Every token through the whole model, chunk after chunk: equals the reference forward.

Block-token evaluations: L·N.
"""

from __future__ import annotations

import numpy as np

from v41c.runtime.artifact import Engine
from v41c.runtime.steps import Floats, Plan, Run, Steps, wanted_rows


def why_not(engine: Engine) -> str | None:
    """None: every engine can."""
    return None


def run(steps: Steps, run: Run, plan: Plan) -> Floats:
    """Logits f32 [1, V] of the last token, or [N, V] of every token."""
    parts = run.parts(steps.most_tokens(steps.whole, plan))
    return np.concatenate([steps.forward([part], wanted_rows(part, run, plan)) for part in parts])
