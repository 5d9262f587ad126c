"""The causal encoder-decoder prefill with bounded replay (DeepSeek-V4.1 report, section 2.1).

The encoder runs over every token; the decoder only over the last `replay_tokens` of them, its window cut at their
start. Block-token evaluations: L_encoder·N + L_decoder·min(N, replay). Equals the full schedule for runs that are no
longer than the replay; beyond, the decoder's deeper window keys are missing by design.
"""

from __future__ import annotations

from collections.abc import Iterator

from v41c.runtime.artifact import Engine
from v41c.runtime.steps import Cuts, Part, Plan, Run


def why_not(engine: Engine) -> str | None:
    """Why the engine has no encoder that can run ahead of its decoder."""
    if not engine.manifest.causal_encoder_decoder:
        return engine.manifest.why_not_ced
    if not engine.programs("encoder"):
        return "it was compiled without the pass split-encoder-decoder"
    return None


def parts(run: Run, plan: Plan) -> Iterator[Part]:
    """The encoder alone up to the tail, then the tail through the whole model: no step needs what another computed."""
    tail = run.part(max(run.start, run.end - plan.replay_tokens), run.end)
    cuts = Cuts()
    if tail.start > run.start:
        yield Part(run.part(run.start, tail.start), decoded=False)
        cuts = Cuts(decoder=tail.start)
    yield Part(tail, plan.rows(tail, run), cuts=cuts)
