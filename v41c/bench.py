"""The driver of `v41c bench`: an engine, PyTorch beside it, and what the machine allows, measured in one process."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from v41c.bench_drafts import draft_ratio, draft_runs
from v41c.bench_images import IMAGES, eager_tower, engine_tower, images_ratio
from v41c.codegen.workers import processors
from v41c.costs import Cost, engine_costs
from v41c.errors import ContextError
from v41c.machine import Limits, Machine
from v41c.runtime import schedules
from v41c.runtime.artifact import Engine, load
from v41c.runtime.profile import seconds_of, some_tokens
from v41c.runtime.session import Session
from v41c.terminal import table

if TYPE_CHECKING:
    from v41c.baseline import Baseline

Tokens = npt.NDArray[np.int32]
Progress = Callable[[str], None]
ENGINE, EAGER, COMPILE = "engine", "eager", "compile"
#: what decoding several sequences at once is called
BATCH = "decode_batch"


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What is measured: prefills of so many tokens, and decode steps after `context` tokens.

    `batch`: also decode so many sequences at once, each after `context` tokens; 0 for none. `draft`: also write texts
    of `drafted` tokens with so many drafts (`auto`: see `Options`) and without; `off` for neither.

    In each of `rounds` every subject does every measurement once, so that a slow minute of the machine hits all. The
    first round warms up and does not count.
    """

    prefill_tokens: tuple[int, ...] = (512, 2048)
    context: int = 2048
    decode_steps: int = 24
    batch: int = 0
    draft: int | str = "off"
    drafted: int = 200
    rounds: int = 5

    @property
    def longest(self) -> int:
        """Tokens that a sequence must have room for."""
        return max(*self.prefill_tokens, self.context + (self.rounds + 1) * self.decode_steps)


@dataclass(frozen=True)
class BenchReport:
    """Tokens per second by subject and measurement, ratios of them, and what they were derived from.

    Ratios say how many times faster the engine is; fractions, how much of the machine's limit it reaches. One that was
    not measured is None. `torch_threads`: for each measurement the number with which the eager model was fastest.
    `images_per_second` by subject: images of the most patches that the model takes, through its vision tower.
    """

    engine: str
    target: str
    arithmetic: str
    machine: Machine
    tokens_per_second: dict[str, dict[str, float]]
    ratios: dict[str, float | None]
    costs: dict[str, Cost]
    torch_threads: dict[str, int] = field(default_factory=dict)
    images_per_second: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        return asdict(self)

    def summary(self) -> str:
        """The same for people."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"timed    {self.engine} for {self.target}, {self.arithmetic} arithmetic"
        yield (
            f"machine  {self.machine.threads} threads, reads {self.machine.read_bytes_per_second / 1e9:.1f} GB/s, "
            f"multiplies {self.machine.flops_per_second / 1e9:.0f} Gflop/s in f32"
        )
        yield ""
        speeds = self.tokens_per_second
        names = list(dict.fromkeys(name for measured in speeds.values() for name in measured))
        rows = [(name, *(_speed(measured.get(name)) for measured in speeds.values())) for name in names]
        yield table(("tokens per second", *speeds), rows)
        if self.images_per_second:
            speed = ("of the largest", *(f"{value:.2f}" for value in self.images_per_second.values()))
            yield ""
            yield table(("images per second", *self.images_per_second), [speed])
        yield ""
        known = [(name, _ratio(name, value)) for name, value in self.ratios.items() if value is not None]
        yield table(("ratio", ""), known)


def bench(
    engine: str | Path,
    against: Sequence[str] = (),
    checkpoint: str | Path | None = None,
    options: BenchOptions | None = None,
    progress: Progress = lambda text: None,
) -> BenchReport:
    """Time an engine, and with `against` the eager model (`eager`) and torch.compile of it (`compile`).

    Raises ArtifactError, ContextError for an engine of too short a context, UsageError for a checkpoint that is not
    the engine's, or UnsupportedError when torch.compile does not work on this machine.
    """
    loaded, options = load(engine), options or BenchOptions()
    loaded.require_weights()
    limit = loaded.manifest.max_context
    if limit < options.longest:
        raise ContextError(
            f"{engine}: context: expected at least {options.longest} tokens to measure in, got {limit}: "
            "compile with a larger --max-context"
        )
    works = _engine_works(loaded, options)
    if loaded.programs("vision"):
        tower = engine_tower(loaded)
        works.append(Work(ENGINE, IMAGES, lambda: [seconds_of(tower)]))
    if options.batch:
        works.append(_batch_work(loaded, options))
    if options.draft != "off":
        runs = draft_runs(loaded, options.draft, options.drafted)
        works += [Work(ENGINE, name, run) for name, run in runs.items()]
    torch_threads: dict[str, int] = {}
    if against:
        works += _torch_works(loaded, against, checkpoint, options, torch_threads, progress)
    limits = Limits()
    speeds = _measure(works, limits, options.rounds, progress)
    images = {subject: measured.pop(IMAGES) for subject, measured in speeds.items() if IMAGES in measured}
    machine = limits.best()
    costs = engine_costs(loaded, options.prefill_tokens, options.context)
    more = _batch_ratio(speeds) | draft_ratio(speeds[ENGINE]) | images_ratio(images)
    return BenchReport(
        engine=str(engine),
        target=loaded.manifest.target,
        arithmetic=loaded.manifest.arithmetic,
        machine=machine,
        tokens_per_second=speeds,
        ratios=ratios(speeds, costs, machine, options.prefill_tokens) | more,
        costs=costs,
        torch_threads=torch_threads,
        images_per_second=images,
    )


@dataclass(frozen=True)
class Work:
    """A measurement of a subject: a call does it once and gives seconds per token, one or more samples."""

    subject: str
    name: str
    run: Callable[[], list[float]]


def _measure(works: Sequence[Work], limits: Limits, rounds: int, progress: Progress) -> dict[str, dict[str, float]]:
    """Tokens per second at the median of all samples but those of the first round."""
    samples: dict[tuple[str, str], list[float]] = {}
    for number in range(rounds + 1):
        limits.sample()
        for work in works:
            progress(f"{work.subject}: {work.name}, {f'round {number} of {rounds}' if number else 'warming up'}")
            seconds = work.run()
            if number:
                samples.setdefault((work.subject, work.name), []).extend(seconds)
    speeds: dict[str, dict[str, float]] = {}
    for (subject, name), seconds in samples.items():
        speeds.setdefault(subject, {})[name] = 1 / statistics.median(seconds)
    return speeds


def _engine_works(engine: Engine, options: BenchOptions) -> list[Work]:
    tokens = some_tokens(engine, options.longest)
    modes = {"": None, "_full": "full"} if schedules.find("ced").why_not(engine) is None else {"": None}

    session, decoding = Session(engine), Session(engine)

    def prefill(count: int, mode: str | None) -> list[float]:
        session.reset()
        return [seconds_of(lambda: session.prefill(tokens[:count], mode=mode)) / count]

    works = [
        Work(ENGINE, f"prefill_{count}{suffix}", partial(prefill, count, mode))
        for count in options.prefill_tokens
        for suffix, mode in modes.items()
    ]
    decoding.prefill(tokens[: options.context])

    def decode(token: int, position: int) -> None:
        decoding.decode(token)

    return [*works, Work(ENGINE, "decode", burst(decode, tokens, options))]


def _batch_work(engine: Engine, options: BenchOptions) -> Work:
    """Decode steps of several sequences at once: seconds per token of any of them."""
    session = Session(engine, slots=options.batch)
    tokens = some_tokens(engine, options.batch * options.longest).reshape(options.batch, options.longest)
    for slot, row in enumerate(tokens):
        session.prefill(row[: options.context], slot=slot)

    def step(token: int, position: int) -> None:
        session.step({slot: row[position : position + 1] for slot, row in enumerate(tokens)})

    decode = burst(step, tokens[0], options)
    return Work(ENGINE, BATCH, lambda: [seconds / options.batch for seconds in decode()])


def _batch_ratio(speeds: Mapping[str, Mapping[str, float]]) -> dict[str, float | None]:
    ours = speeds[ENGINE]
    return {f"{BATCH}_vs_decode": ours[BATCH] / ours["decode"]} if BATCH in ours else {}


def _torch_works(
    engine: Engine,
    against: Sequence[str],
    checkpoint: str | Path | None,
    options: BenchOptions,
    torch_threads: dict[str, int],
    progress: Progress,
) -> list[Work]:
    from v41c.baseline import Baseline
    from v41c.origin import checkpoint_of

    source = checkpoint_of(engine, None if checkpoint is None else Path(checkpoint))
    progress("loading the eager model")
    baseline = Baseline(source)
    tokens = some_tokens(engine, options.longest)
    runs = _TorchRuns(baseline, tokens, options)
    eager = [Work(EAGER, f"prefill_{count}", runs.prefill(count, baseline.full)) for count in options.prefill_tokens]
    if schedules.find("ced").why_not(engine) is None:
        eager += [
            Work(EAGER, f"prefill_{count}_ced", runs.prefill(count, baseline.ced)) for count in options.prefill_tokens
        ]
    eager.append(Work(EAGER, "decode", runs.decode(baseline.full)))
    if engine.programs("vision"):
        tower = eager_tower(engine, baseline.model)
        eager.append(Work(EAGER, IMAGES, lambda: [seconds_of(tower)]))
    for work in eager:
        progress(f"how many threads are best for {work.name} of the eager model")
        torch_threads[work.name] = _best_threads(work)
    compiled = [
        Work(COMPILE, f"prefill_{count}", runs.prefill(count, baseline.compiled)) for count in options.prefill_tokens
    ]
    compiled.append(Work(COMPILE, "decode", runs.decode(baseline.compiled)))
    chosen = [work for name, works in ((EAGER, eager), (COMPILE, compiled)) if name in against for work in works]
    return [_with_threads(work, torch_threads[work.name]) for work in chosen]


class _TorchRuns:
    """Measurements of ways to feed a baseline."""

    def __init__(self, baseline: Baseline, tokens: Tokens, options: BenchOptions) -> None:
        import torch

        self._baseline, self._options, self._plain = baseline, options, tokens
        self._tokens = torch.from_numpy(tokens)

    def prefill(self, count: int, feed: Callable[..., object]) -> Callable[[], list[float]]:
        """A prefill of a new sequence."""

        def run() -> list[float]:
            states = self._baseline.new_states(self._options.longest)
            return [seconds_of(lambda: feed(self._tokens[:count], states)) / count]

        return run

    def decode(self, feed: Callable[..., object]) -> Callable[[], list[float]]:
        """Bursts of decode steps of one sequence."""
        states = self._baseline.new_states(self._options.longest)
        self._baseline.full(self._tokens[: self._options.context], states)

        def step(token: int, position: int) -> None:
            feed(self._tokens[position : position + 1], states, position)

        return burst(step, self._plain, self._options)


def burst(step: Callable[[int, int], object], tokens: Tokens, options: BenchOptions) -> Callable[[], list[float]]:
    """Decode steps in a row, each timed, the first two of a burst left out: they find the caches of others."""
    cold = min(2, options.decode_steps - 1)

    def run() -> list[float]:
        seconds = []
        for position in range(options.context, options.context + options.decode_steps):
            seconds.append(seconds_of(partial(step, int(tokens[position]), position)))
        return seconds[cold:]

    return run


def _best_threads(work: Work) -> int:
    """One, or one per processor: the number with which the work is done sooner."""
    found = {}
    for count in sorted({1, processors()}):
        run = _with_threads(work, count).run
        run()
        found[count] = statistics.median(run())
    return min(found, key=lambda count: found[count])


def _with_threads(work: Work, count: int) -> Work:
    import torch

    def run() -> list[float]:
        before = torch.get_num_threads()
        torch.set_num_threads(count)
        try:
            return work.run()
        finally:
            torch.set_num_threads(before)

    return Work(work.subject, work.name, run)


def ratios(
    speeds: Mapping[str, Mapping[str, float]],
    costs: Mapping[str, Cost],
    machine: Machine,
    prefill_tokens: Sequence[int] = (512, 2048),
) -> dict[str, float | None]:
    """The engine's speed over that of PyTorch, and over the machine's limits; None where one is missing."""
    ours = speeds.get(ENGINE, {})

    def over(name: str, subject: str, theirs: str) -> float | None:
        a, b = ours.get(name), speeds.get(subject, {}).get(theirs)
        return None if a is None or b is None else a / b

    found = {"decode_vs_eager": over("decode", EAGER, "decode"), "decode_vs_compile": over("decode", COMPILE, "decode")}
    for count in prefill_tokens:
        name = f"prefill_{count}"
        found[f"{name}_vs_eager"] = over(name, EAGER, name)
        found[f"{name}_vs_eager_ced"] = over(name, EAGER, f"{name}_ced")
        found[f"{name}_vs_compile"] = over(name, COMPILE, name)
    longest = f"prefill_{max(prefill_tokens)}"
    found["decode_bandwidth_fraction"] = (
        ours["decode"] * costs["decode"].traffic_bytes / machine.read_bytes_per_second if "decode" in ours else None
    )
    found["prefill_arithmetic_fraction"] = (
        ours[longest] * costs[longest].flops / max(prefill_tokens) / machine.flops_per_second
        if longest in ours
        else None
    )
    return found


def _speed(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _ratio(name: str, value: float) -> str:
    return f"{value:.0%}" if name.endswith("_fraction") else f"{value:.2f}x"
