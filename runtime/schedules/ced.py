"""The causal encoder-decoder prefill with bounded replay (DeepSeek-V4.1 report, section 2.1).

The encoder runs over every token, in chunks; the decoder only over the last `replay_tokens` of them, its window cut at
their start. Block-token evaluations: L_encoder·N + L_decoder·min(N, replay). Equals the full schedule for runs that are
no longer than the replay; beyond, the decoder's deeper window keys are missing by design.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from v41c.runtime.artifact import Engine
from v41c.runtime.states import Array
from v41c.runtime.steps import Floats, Plan, Run, Steps, wanted_rows


def why_not(engine: Engine) -> str | None:
    """Why the engine has no encoder that can run ahead of its decoder."""
    if not engine.manifest.causal_encoder_decoder:
        return engine.manifest.why_not_ced
    if not engine.programs("encoder"):
        return "it was compiled without the pass split-encoder-decoder"
    return None


def run(steps: Steps, run: Run, plan: Plan) -> Floats:
    """Logits f32 [1, V] of the last token, or [min(N, replay), V] of the replayed ones."""
    tail = run.part(max(run.start, run.end - plan.replay_tokens), run.end)
    encoded = _encode(steps, run, tail, plan)
    if tail.start > run.start:
        steps.cuts[run.slot] = tail.start
    logits = []
    for part in tail.parts(steps.most_tokens(["decoder"], plan)):
        fed = {name: array[part.start - tail.start : part.end - tail.start] for name, array in encoded.items()}
        logits.append(steps.decode([part], fed, wanted_rows(part, run, plan)))
    return np.concatenate(logits)


def _encode(steps: Steps, run: Run, tail: Run, plan: Plan) -> Mapping[str, Array]:
    """Run the encoder over everything and keep its outputs for the tail: memory does not grow with the run."""
    kept: dict[str, Array] = {}
    for part in run.parts(steps.most_tokens(["encoder"], plan)):
        outputs = steps.encode([part])
        begin = max(part.start, tail.start)
        if begin >= part.end:
            continue
        for name, array in outputs.items():
            if name not in kept:
                kept[name] = np.empty((len(tail.tokens), *array.shape[1:]), array.dtype)
            kept[name][begin - tail.start : part.end - tail.start] = array[begin - part.start :]
    return kept
