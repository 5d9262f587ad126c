"""What each pass is worth: the engine without it beside the whole one, measured in one process in turns."""

from __future__ import annotations

import gc
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from v41c.bench import BenchOptions, Work, burst
from v41c.costs import Cost, engine_costs
from v41c.errors import UsageError
from v41c.manifest import MANIFEST_FILE
from v41c.runtime.artifact import Engine, load
from v41c.runtime.profile import seconds_of, some_tokens
from v41c.runtime.session import Session

if TYPE_CHECKING:
    from v41c.codegen.kernel import Kernel
    from v41c.compile import CompileOptions

Progress = Callable[[str], None]
Phase = Literal["decode", "prefill"]
PHASES: tuple[Phase, ...] = ("decode", "prefill")
FULL, AGAIN, NONE = "every pass", "every pass, again", "no optional pass"
#: contexts at which the cost model is asked when a pass would begin to pay, and the share that counts as paying
_CONTEXTS = tuple(2**power for power in range(8, 21))
_WORTH = 0.01
#: tokens whose logits are compared, the last of them decoded one by one
_COMPARED, _SINGLY = 104, 8


@dataclass(frozen=True)
class AblateOptions:
    """Prefills of `prefill_tokens`, decode steps after `context` tokens; all engines in turn in each of `rounds`."""

    context: int = 2048
    prefill_tokens: int = 512
    decode_steps: int = 12
    rounds: int = 15

    @property
    def bench(self) -> BenchOptions:
        """The same as a benchmark takes it."""
        return BenchOptions(
            prefill_tokens=(self.prefill_tokens,),
            context=self.context,
            decode_steps=self.decode_steps,
            rounds=self.rounds,
        )


@dataclass(frozen=True)
class Ratio:
    """Time without a pass over time with every pass: the median of the rounds' ratios, and their quartiles."""

    median: float
    low: float
    high: float

    @property
    def noise(self) -> float:
        """Half of what lies between the quartiles."""
        return (self.high - self.low) / 2


@dataclass(frozen=True)
class Variant:
    """An engine and how it compares with the one of every pass.

    `ratios` by phase are above 1 where it is slower. `traffic` (bytes of weights and states) and `arithmetic` are those
    of a decode step over those of the full engine. `launches` of a decode step, `arena_bytes` of the largest program.
    `relative_l2` and `kl_nats` compare logits; both are 0 exactly when every bit is equal.
    """

    name: str
    passes: tuple[str, ...]
    seconds: dict[str, float]
    ratios: dict[str, Ratio]
    traffic: float
    arithmetic: float
    launches: int
    arena_bytes: int
    identical: bool
    relative_l2: float
    kl_nats: float


@dataclass(frozen=True)
class Judgement:
    """Whether a pass pays: `verdict` by phase is pays, costs or neither; `text` says it with the noise beside it."""

    name: str
    verdict: dict[str, str]
    text: str


@dataclass(frozen=True)
class AblateReport:
    """Every engine that was measured, and a judgement on every optional pass."""

    checkpoint: str
    target: str
    arithmetic: str
    options: AblateOptions
    variants: list[Variant]
    judgements: list[Judgement]

    def to_json(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        return asdict(self)

    def summary(self) -> str:
        """The same for people."""
        from v41c.ablate_text import report_text

        return report_text(self)


def ablate(
    path: str | Path,
    checkpoint: str | Path | None = None,
    options: AblateOptions | None = None,
    plot: str | Path | None = None,
    progress: Progress = lambda text: None,
) -> AblateReport:
    """Compile and measure an engine, or that of a checkpoint, without each optional pass and without all of them.

    `plot` is a file for a drawing of it (png, svg). Raises UsageError for a checkpoint that is not the engine's or a
    drawing that cannot be made, and what `compile` raises.
    """
    from v41c.ablate_text import judge

    options = options or AblateOptions()
    draw = None if plot is None else _drawing(Path(plot))
    with tempfile.TemporaryDirectory(prefix="v41c-") as folder:
        source, engines = _engines(Path(path), checkpoint, options, Path(folder), progress)
        samples = _measure(engines, options, progress)
        progress("comparing logits")
        variants = _variants(engines, samples, options)
        savings = {name: _begins(engines[FULL], engine) for name, engine in engines.items()}
        full = engines[FULL].manifest
        judgements = judge(variants, savings, options)
        engines.clear()
        gc.collect()
    report = AblateReport(str(source), full.target, full.arithmetic, options, variants, judgements)
    if draw is not None:
        draw(report)
    return report


def _drawing(file: Path) -> Callable[[AblateReport], None]:
    """Draws to a file; that it cannot be done is said before anything is measured."""
    from v41c.ablate_plot import drawing

    return drawing(file)


def without(names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Passes of every engine by what is left out; the whole one first, and last without anything optional."""
    from v41c.passes.pipeline import REQUIRED

    optional = [name for name in names if name not in REQUIRED]
    left = {name: tuple(each for each in names if each != name) for name in optional}
    return {FULL: tuple(names), **left, NONE: tuple(name for name in names if name in REQUIRED)}


def subject_of(
    path: Path, given: str | Path | None, options: AblateOptions
) -> tuple[Path, tuple[str, ...], CompileOptions]:
    """The checkpoint of what is ablated, the passes of the whole engine, and how everything else is compiled."""
    from v41c.compile import CompileOptions
    from v41c.origin import checkpoint_of
    from v41c.passes.pipeline import pass_names

    compiled = CompileOptions(max_context=max(options.bench.longest, _COMPARED))
    if not (path / MANIFEST_FILE).is_file():
        if given is not None:
            raise UsageError("--checkpoint: expected it with an engine, got a checkpoint already")
        return path, pass_names(), compiled
    engine = load(path)
    source = checkpoint_of(engine, None if given is None else Path(given))
    names = tuple(entry.name for entry in engine.manifest.passes[1:])
    return source, names, replace(compiled, target=engine.manifest.target, arithmetic=engine.manifest.arithmetic)


def _engines(
    path: Path, given: str | Path | None, options: AblateOptions, folder: Path, progress: Progress
) -> tuple[Path, dict[str, Engine]]:
    """The checkpoint, and all engines by what they lack."""
    from v41c.compile import compile

    source, names, compiled = subject_of(path, given, options)
    kernels: dict[str, Kernel] = {}
    engines = {}
    for number, (name, passes) in enumerate(without(names).items()):

        def show(text: str, name: str = name) -> None:
            progress(f"{name if name in (FULL, NONE) else f'without {name}'}: {text}")

        place = folder / f"{number:02d}"
        compile(source, place, replace(compiled, passes=",".join(passes)), show, kernels)
        engines[name] = load(place)
    return source, engines


def _measure(
    engines: Mapping[str, Engine], options: AblateOptions, progress: Progress
) -> dict[tuple[str, str], list[float]]:
    """Median seconds per token of each round by engine and phase; the full engine takes part twice."""
    works = [work for name, engine in engines.items() for work in _works(name, engine, options)]
    works += _works(AGAIN, engines[FULL], options)
    found: dict[tuple[str, str], list[float]] = {}
    for number in range(options.rounds + 1):
        # one behind the other in both directions: whoever comes first does not always do
        for work in works if number % 2 else works[::-1]:
            progress(
                f"{work.subject}: {work.name}, {f'round {number} of {options.rounds}' if number else 'warming up'}"
            )
            seconds = statistics.median(work.run())
            if number:
                found.setdefault((work.subject, work.name), []).append(seconds)
    return found


def _works(name: str, engine: Engine, options: AblateOptions) -> Iterator[Work]:
    bench = options.bench
    tokens = some_tokens(engine, bench.longest)
    session, decoding = Session(engine), Session(engine)
    decoding.prefill(tokens[: options.context])

    def prefill() -> list[float]:
        session.reset()
        count = options.prefill_tokens
        return [seconds_of(lambda: session.prefill(tokens[:count])) / count]

    def decode(token: int, position: int) -> None:
        decoding.decode(token)

    yield Work(name, "decode", burst(decode, tokens, bench))
    yield Work(name, "prefill", prefill)


def _variants(
    engines: Mapping[str, Engine], samples: Mapping[tuple[str, str], list[float]], options: AblateOptions
) -> list[Variant]:
    wanted = _logits(engines[FULL])
    base = _cost(engines[FULL], options.context)
    return [
        _variant(name, engines[FULL if name == AGAIN else name], samples, wanted, base, options)
        for name in (FULL, AGAIN, *(name for name in engines if name != FULL))
    ]


def _variant(
    name: str,
    engine: Engine,
    samples: Mapping[tuple[str, str], list[float]],
    wanted: Any,
    base: Cost,
    options: AblateOptions,
) -> Variant:
    from v41c.difference import logits_row

    found = _logits(engine)
    row = logits_row(found, wanted)
    identical = found.tobytes() == wanted.tobytes()
    cost = _cost(engine, options.context)
    manifest = engine.manifest
    return Variant(
        name=name,
        passes=tuple(entry.name for entry in manifest.passes[1:]),
        seconds={phase: statistics.median(samples[name, phase]) for phase in PHASES},
        ratios={phase: _ratio(samples[name, phase], samples[FULL, phase]) for phase in PHASES},
        traffic=cost.traffic_bytes / base.traffic_bytes,
        arithmetic=cost.flops / base.flops,
        launches=manifest.passes[-1].launches,
        arena_bytes=max(program.arena_bytes for program in manifest.programs),
        identical=identical,
        relative_l2=row.error.relative_l2,
        kl_nats=0.0 if identical else row.kl_nats,
    )


def _ratio(ours: Sequence[float], full: Sequence[float]) -> Ratio:
    ratios = [ours[number] / full[number] for number in range(len(full))]
    low, median, high = np.quantile(ratios, (0.25, 0.5, 0.75))
    return Ratio(float(median), float(low), float(high))


def _logits(engine: Engine) -> Any:
    """Of a prompt that every layer sees, in chunks and then token by token: f32 [N, V]."""
    tokens = some_tokens(engine, _COMPARED)
    session = Session(engine)
    prompt = session.prefill_all(tokens[:-_SINGLY], mode="full")
    return np.concatenate([prompt, np.stack([session.decode(int(token)) for token in tokens[-_SINGLY:]])])


def _cost(engine: Engine, context: int) -> Cost:
    return engine_costs(engine, (), context)["decode"]


def _begins(full: Engine, engine: Engine) -> int | None:
    """The least context, a power of two, from which a decode step computes or reads less in the full engine.

    0 where it does so at any context, None where the two compute and read the same at all of them.
    """
    worth = [_saves(_cost(full, context), _cost(engine, context)) for context in _CONTEXTS]
    if not any(worth):
        return None
    return 0 if all(worth) else _CONTEXTS[worth.index(True)]


def _saves(full: Cost, cost: Cost) -> bool:
    less = 1 - _WORTH
    return full.flops < less * cost.flops or full.traffic_bytes < less * cost.traffic_bytes
