"""A compiled engine's batches: whatever shares its steps, a sequence gets the same tokens from the same logits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import numpy as np
import pytest

from v41c.frontend.presets import TRAINED_CHECKPOINT
from v41c.runtime.artifact import Engine, load
from v41c.runtime.batch import Batch
from v41c.runtime.request import Options, Request
from v41c.runtime.session import Session
from v41c.runtime.steps import Floats, Part

EngineOf = Callable[..., Path]
NEW_TOKENS = 10


class Watched(Session):
    """A session that keeps the logits of every sequence; memory that no token has written holds NaN."""

    def __init__(self, engine: Engine, slots: int) -> None:
        super().__init__(engine, slots=slots, poison=True)
        self.logits: list[list[Floats]] = [[] for _ in range(slots)]
        self.shared = 0

    def advance(self, parts: Sequence[Part], *, revocable: Collection[int] = ()) -> list[Floats]:
        """A step."""
        found = super().advance(parts, revocable=revocable)
        self.shared = max(self.shared, len(parts))
        for part, rows in zip(parts, found, strict=True):
            self.logits[part.run.slot] += list(rows)
        return found


def continued(
    engine: Engine, prompts: Sequence[np.ndarray], options: Options, budget: int | None
) -> list[tuple[list[int], Floats]]:
    """Tokens and logits of prompts, all of them in one batch, of which a new one joins at every step."""
    session = Watched(engine, len(prompts))
    batch = Batch(session, token_budget=budget)
    requests = [Request(prompt, options) for prompt in prompts]
    for request in requests:
        batch.add(request)
        batch.step()
    while not batch.idle:
        batch.step()
    assert session.shared > len(prompts) // 2
    return [(r.result.tokens, np.stack(rows)) for r, rows in zip(requests, session.logits, strict=True)]


@pytest.mark.parametrize("mode", ["ced", "full"])
def test_a_batch_of_three_or_eight_is_as_if_alone(engine_of: EngineOf, mode: str) -> None:
    engine = load(engine_of(TRAINED_CHECKPOINT, "release"))
    draw = np.random.default_rng(7)
    window = engine.manifest.window
    lengths = (window + 9, 3, 2 * window + 5, 1, 17, window, 64, 33)
    prompts = [draw.integers(5, engine.manifest.vocabulary - 4, length) for length in lengths]
    options = Options(NEW_TOKENS, mode=mode)
    alone = [continued(engine, [prompt], options, None)[0] for prompt in prompts]
    for count, budget in ((3, None), (8, 24), (8, None)):
        together = continued(engine, prompts[:count], options, budget)
        for number, ((tokens, logits), (wanted, exact)) in enumerate(zip(together, alone[:count], strict=True)):
            assert tokens == wanted, f"sequence {number} of {count}"
            np.testing.assert_array_equal(logits, exact, f"sequence {number} of {count}")
