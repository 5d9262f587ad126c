"""Which pass moved the numbers, and in which layer it first shows: every stage interpreted on the same steps."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from torch import Tensor

from v41c.arena import interpret_in_arena, is_planned, overlaps
from v41c.compile import Source, quantized_source
from v41c.difference import LogitsRow, logits_row
from v41c.errors import UsageError
from v41c.interpreted import cached
from v41c.ir.interpret import interpret
from v41c.ir.text import print_module
from v41c.ir.types import DType
from v41c.layers import layer_of
from v41c.passes import quantize
from v41c.passes.context import Numbers
from v41c.passes.pipeline import TRACE, Stage, numbers_of
from v41c.playback import Playback, Seen, Step, script
from v41c.subject import LANDMARK
from v41c.tensor_change import Change, change_of
from v41c.terminal import bytes_text

if TYPE_CHECKING:
    from v41c.ir.graph import Module, Value

Progress = Callable[[str], None]
Outcome = Literal["unchanged", "exact", "within tolerance", "moved"]
SEED = 0
#: stored weights of the largest model that is interpreted: seconds a stage, and the weights fit into memory
MOST_WEIGHT_BYTES = 1 << 30


@dataclass(frozen=True)
class Place:
    """Where a difference first shows: a value or state of a step, and the layer it lies in (empty outside of them)."""

    step: str
    name: str
    layer: str

    def __str__(self) -> str:
        layer = f" in {self.layer}" if self.layer else ""
        return f"{self.name}{layer}, {self.step}"


@dataclass(frozen=True)
class Integers:
    """Integers of one kind (`experts`, `selection`, …) over all layers and steps: rows, and those that changed."""

    kind: str
    rows: int
    changed: int


@dataclass(frozen=True)
class PassVerdict:
    """What a pass did to the numbers.

    `compared`: values and states that stand before and after it, over all steps; `changes` are those that differ, in
    the order in which they were computed. `first` is the first of them, `first_landmark` the first that the eager model
    names, and `relative_l2` the largest of theirs. `allowed` is what the pass may do, with `why`; `overlaps` are places
    of the arena in which two values that are needed at once lie. `logits` are compared over all steps.
    """

    name: str
    outcome: Outcome
    passed: bool
    why: str
    allowed: float | None
    compared: int = 0
    relative_l2: float = 0.0
    first: Place | None = None
    first_landmark: Place | None = None
    logits: LogitsRow | None = None
    integers: list[Integers] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    arena_bytes: dict[str, int] = field(default_factory=dict)
    overlaps: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class VerifyReport:
    """Verdicts on all passes in order. `weights` says which weights the graphs were interpreted with."""

    weights: str
    steps: list[str]
    passes: list[PassVerdict]

    @property
    def failed(self) -> list[PassVerdict]:
        """Passes that moved what they must not move."""
        return [verdict for verdict in self.passes if not verdict.passed]

    def to_json(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        return asdict(self) | {"passed": not self.failed}

    def summary(self) -> str:
        """The same for people."""
        from v41c.verify_text import report_text

        return report_text(self)


def moved_text(failed: Sequence[PassVerdict]) -> str:
    """What the first pass that failed did, in one line."""
    verdict, *others = failed
    more = f" (and {', '.join(other.name for other in others)})" if others else ""
    if verdict.overlaps:
        return f"pass {verdict.name}{more}: values that are needed at once share memory: {verdict.overlaps[0]}"
    may = f"by at most {verdict.allowed:g}" if verdict.allowed else "by nothing"
    place = verdict.first_landmark or verdict.first
    where = f", which shows first in {place}" if place else ""
    return (
        f"pass {verdict.name}{more}: expected numbers to move {may}, got {len(verdict.changes)} of {verdict.compared} "
        f"values moved, by up to {verdict.relative_l2:.2g}{where}"
    )


def require_interpretable(source: Source, path: Path) -> None:
    """UsageError for a model that is too large to be interpreted."""
    from v41c.frontend.tensor_names import expected_tensors

    size = sum(spec.size_bytes for spec in expected_tensors(source.config, source.formats).values())
    if size > MOST_WEIGHT_BYTES:
        raise UsageError(
            f"{path}: --verify interprets every graph and takes models of at most {bytes_text(MOST_WEIGHT_BYTES)} of "
            f"weights, this one has {bytes_text(size)}: verify the passes on a smaller model of the same layer plan"
        )


def verify_stages(stages: Sequence[Stage], source: Source, progress: Progress = lambda text: None) -> VerifyReport:
    """Interpret every stage on the same random steps and compare it with the stage before."""
    with _with_weights(source, any(stage.name == quantize.NAME for stage in stages)) as full:
        steps = script(full.config, SEED)
        weight = _reader(full)
        before: list[list[Seen]] = []
        verdicts = []
        for previous, stage in zip([None, *stages], stages, strict=False):
            numbers = numbers_of(stage.name) if stage.name != TRACE else Numbers("", 0.0)
            if previous is not None and _same(previous.module, stage.module):
                verdicts.append(PassVerdict(stage.name, "unchanged", True, "", numbers.relative_l2))
                continue
            after = []
            playback = _playback(full, stage.module, weight)
            for step in steps:
                progress(f"verifying {stage.name}: {step.name}")
                after.append(playback.play(step))
            if previous is not None:
                verdicts.append(_verdict(stage, numbers, steps, before, after))
            before = after
    return VerifyReport("checkpoint" if source.checkpoint else "random", [step.name for step in steps], verdicts)


def _same(left: Module, right: Module) -> bool:
    return left is right or print_module(left) == print_module(right)


def _playback(source: Source, module: Module, weight: Callable[[Value], Tensor]) -> Playback:
    planned = all(is_planned(graph) for graph in module)
    return Playback(source.config, module, weight, interpret_in_arena if planned else interpret)


def _reader(source: Source) -> Callable[[Value], Tensor]:
    """Weights as graphs type them; what a pass quantises is read as it is stored for the graphs before that pass."""
    from v41c.frontend.quantized_checkpoint import QuantizedCheckpoint
    from v41c.frontend.weights import tensor_reader

    checkpoint = source.checkpoint
    if checkpoint is None:
        raise ValueError("source: expected weights, got a configuration alone")
    read = tensor_reader(checkpoint, source.compressed_ids)
    if not isinstance(checkpoint, QuantizedCheckpoint):
        return cached(read)
    stored = tensor_reader(checkpoint.original, source.compressed_ids)
    return cached(lambda value: (stored if value.type.dtype == DType.BF16 else read)(value))


@contextmanager
def _with_weights(source: Source, quantizes: bool) -> Iterator[Source]:
    """The source, or one with random weights in the formats of its configuration where it has none."""
    if source.checkpoint is not None:
        yield source
        return
    from v41c.frontend.checkpoint import Checkpoint
    from v41c.frontend.initialize import write_weights

    config = source.config
    with tempfile.TemporaryDirectory(prefix="v41c-") as folder:
        write_weights(Path(folder), config, SEED, lambda done, total: None)
        most = max(1, config.engram_compressed_vocab_size)
        ids = np.random.default_rng(SEED).integers(0, most, config.vocab_size).astype(np.int32)
        made = Source(config, source.formats, Checkpoint(Path(folder)), None, ids if config.has_engram else None)
        yield quantized_source(made) if quantizes else made


def _verdict(
    stage: Stage,
    numbers: Numbers,
    steps: Sequence[Step],
    before: Sequence[Sequence[Seen]],
    after: Sequence[Sequence[Seen]],
) -> PassVerdict:
    changes: list[Change] = []
    rows: dict[str, list[int]] = {}
    compared = 0
    for step, old, new in zip(steps, before, after, strict=True):
        wanted = {(seen.part, seen.name, seen.is_state): seen.tensor for seen in old}
        for seen in new:
            tensor = wanted.get((seen.part, seen.name, seen.is_state))
            if tensor is None:
                continue
            if tensor.shape == seen.tensor.shape:
                compared += 1
                found = change_of(step.name, seen, tensor)
                changes += [] if found is None else [found]
                _count(rows, seen, 0 if found is None else found.rows_changed)
            elif not seen.is_state:
                compared += 1
                changes.append(Change(step.name, seen.name, False, float("inf"), float("inf"), len(tensor)))
    broken = [text for graph in stage.module if is_planned(graph) for text in overlaps(graph)]
    worst = max((change.relative_l2 for change in changes), default=0.0)
    outcome = _outcome(changes, worst, numbers)
    return PassVerdict(
        stage.name,
        outcome,
        passed=not broken and (outcome != "moved" or numbers.relative_l2 is None),
        why=numbers.why,
        allowed=numbers.relative_l2,
        compared=compared,
        relative_l2=worst,
        first=_first(changes),
        first_landmark=_first([change for change in changes if LANDMARK.fullmatch(change.name)]),
        logits=_logits(before, after),
        integers=[Integers(kind, total, changed) for kind, (total, changed) in sorted(rows.items())],
        changes=changes,
        arena_bytes=_arenas(stage.module),
        overlaps=broken,
    )


def _outcome(changes: Sequence[Change], worst: float, numbers: Numbers) -> Outcome:
    """Integers have no tolerance: where one is allowed to differ, the pass computes something else on purpose."""
    if not changes:
        return "exact"
    close = numbers.relative_l2 is not None and worst <= numbers.relative_l2
    return "within tolerance" if close and not any(change.is_integer for change in changes) else "moved"


def _count(rows: dict[str, list[int]], seen: Seen, changed: int) -> None:
    if not seen.is_state and not seen.tensor.is_floating_point() and seen.tensor.dim():
        total = rows.setdefault(seen.name.rpartition(".")[2], [0, 0])
        total[0] += len(seen.tensor)
        total[1] += changed


def _first(changes: Sequence[Change]) -> Place | None:
    return Place(changes[0].step, changes[0].name, layer_of(changes[0].name)) if changes else None


def _logits(before: Sequence[Sequence[Seen]], after: Sequence[Sequence[Seen]]) -> LogitsRow | None:
    """The backbone's logits of all steps."""
    found, wanted = (_outputs(seen, "logits") for seen in (after, before))
    return logits_row(found, wanted) if found.shape == wanted.shape and len(found) else None


def _outputs(steps: Sequence[Sequence[Seen]], name: str) -> Any:
    parts = [
        seen.tensor.float().numpy()
        for step in steps
        for seen in step
        if seen.part == "model" and seen.is_output and seen.name == name
    ]
    return np.concatenate(parts) if parts else np.empty((0, 0), np.float32)


def _arenas(module: Module) -> dict[str, int]:
    from v41c.passes.plan_memory import arena_bytes

    return {graph.name: arena_bytes(graph) for graph in module if is_planned(graph)}
