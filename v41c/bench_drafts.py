"""What drafting does to the speed of a text that the model writes itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from v41c.errors import UsageError
from v41c.run import open_session
from v41c.runtime.artifact import Engine
from v41c.runtime.generate import Generation
from v41c.runtime.profile import some_tokens
from v41c.runtime.request import Options

#: what the same texts are called without drafts and with them
TEXT, DRAFTED = "text", "text_drafted"


def draft_runs(engine: Engine, draft: int | str, tokens: int) -> Mapping[str, Callable[[], list[float]]]:
    """By name, what writes `tokens` tokens greedily behind another token each time: seconds per token.

    UsageError where the engine cannot draft that.
    """
    if not engine.programs("draft"):
        raise UsageError(f"draft: expected an engine with a draft head, {engine.path} has none")
    begin = [token for token in [engine.manifest.bos_token] if token is not None]
    return {
        name: _Texts(engine, begin, Options(tokens, draft=choice)) for name, choice in ((TEXT, "off"), (DRAFTED, draft))
    }


class _Texts:
    def __init__(self, engine: Engine, begin: list[int], options: Options) -> None:
        self._session = open_session(engine, options)
        self._begin, self._options = begin, options
        self._firsts = iter(some_tokens(engine, 1000).tolist())

    def __call__(self) -> list[float]:
        while True:
            self._session.reset()
            generation = Generation(self._session, [*self._begin, next(self._firsts)], self._options)
            list(generation)
            if generation.result.decode_tokens:  # else the text was over at once
                return [generation.result.decode_seconds / generation.result.decode_tokens]


def draft_ratio(speeds: Mapping[str, float]) -> dict[str, float | None]:
    """How many times faster texts are with drafts; empty where that was not measured."""
    return {f"{DRAFTED}_vs_{TEXT}": speeds[DRAFTED] / speeds[TEXT]} if DRAFTED in speeds else {}
