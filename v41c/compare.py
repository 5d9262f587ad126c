"""The driver of `v41c compare`: how far an engine is from the eager model, or from golden tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from v41c.difference import CedRow, DivergenceRow, Phase, compare_phase, divergence_row, logits_row
from v41c.errors import ContextError, UsageError
from v41c.manifest import MANIFEST_FILE
from v41c.subject import FORCED, Arithmetic, Array, EagerSubject, EngineSubject, Notes, Subject
from v41c.verdict import Verdict, skipped, unjudged

if TYPE_CHECKING:
    from v41c.frontend.config import ModelConfig
    from v41c.runtime.artifact import Engine

#: tokens per step of the eager model that the noise floor is measured with: few enough that the matrix library adds up
#: in another order than for a long prompt (from about 5 rows on it does not), and more than the one of a decode step
FLOOR_CHUNK = 3
_ARITHMETICS: tuple[Arithmetic, ...] = ("exact", "release")
_FLOOR = "floor: the eager model in other groups of tokens"
Progress = Callable[[str], None]


@dataclass(frozen=True)
class CompareReport:
    """What `v41c compare` found: phases and ced against the eager model, or verdicts against golden tensors.

    `quantized`: of an engine that the pass `quantize` gave other weights than its checkpoint has, what they cost.
    """

    engine: str
    arithmetic: str
    against: str
    phases: list[Phase] = field(default_factory=list)
    ced: list[CedRow] = field(default_factory=list)
    why_not_ced: str = ""
    quantized: list[DivergenceRow] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether no criterion failed; there are none without golden tensors."""
        return all(verdict.passed is not False for verdict in self.verdicts)

    def to_json(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        return asdict(self) | {"passed": self.passed}

    def summary(self) -> str:
        """The report for people."""
        from v41c.compare_text import report_text

        return report_text(self)


def compare(
    engine: str | Path,
    against: str = "eager",
    golden: str | Path | None = None,
    checkpoint: str | Path | None = None,
    *,
    tokens: Sequence[int] | None = None,
    prompt_tokens: int = 96,
    decode_steps: int = 16,
    progress: Progress = lambda text: None,
) -> CompareReport:
    """Compare an engine folder with the eager model of its checkpoint, on `tokens` or on a default text.

    An engine whose weights were quantised is shown beside the model as its checkpoint stores it, and not judged.
    With `golden` the engine and the eager model are held against a folder of golden tensors; then `engine` may also be
    a checkpoint folder, whose eager model is judged in both arithmetics. Raises UsageError, ConfigError,
    CheckpointError, ArtifactError or ContextError.
    """
    if against != "eager":
        raise UsageError(f"--against: expected eager, got {against}")
    path, given = Path(engine), None if checkpoint is None else Path(checkpoint)
    if golden is not None:
        return _against_golden(path, Path(golden), given, progress)
    from v41c.runtime.artifact import load

    return _against_eager(load(path), given, tokens, prompt_tokens, decode_steps, progress)


def _against_golden(path: Path, golden: Path, checkpoint: Path | None, progress: Progress) -> CompareReport:
    from v41c.criteria import judge
    from v41c.golden import read_golden

    subjects, reference, quantized = _subjects(path, golden, checkpoint)
    verdicts: list[Verdict] = []
    for subject in subjects:
        _require_same_model(path, subject.config, golden)
        runs = read_golden(golden, subject.config, subject.arithmetic)
        if not runs:
            note = f"no golden tensors in {subject.arithmetic} arithmetic"
            verdicts.append(skipped(subject.name, "every run", note))
        for run in runs:
            progress(f"{subject.name}: run {run.name}")
            found = judge(subject, run, reference)
            verdicts += found if subject.name not in quantized else map(unjudged, found)
    arithmetics = dict.fromkeys(subject.arithmetic for subject in subjects)
    return CompareReport(str(path), " and ".join(arithmetics), str(golden), verdicts=verdicts)


def _subjects(
    path: Path, golden: Path, checkpoint: Path | None
) -> tuple[list[Subject], Subject | None, frozenset[str]]:
    """The engine, the interpreter on its graphs and the eager model, or the eager model in both arithmetics.

    Beside them the interpreter as the reference that engines are judged with. Round trips are part of the release, so
    only in exact arithmetic is the interpreter worth a verdict of its own: there it must equal independent tensors.
    Last, the names of those that compute with other weights than the checkpoint's.
    """
    from v41c.frontend.checkpoint import INDEX_FILE, SINGLE_FILE
    from v41c.interpreted import InterpretedSubject
    from v41c.origin import checkpoint_of
    from v41c.quantization import is_quantized
    from v41c.runtime.artifact import load as load_engine

    if not (path / MANIFEST_FILE).is_file() and any((path / name).is_file() for name in (SINGLE_FILE, INDEX_FILE)):
        return [EagerSubject.of_checkpoint(path, arithmetic) for arithmetic in _ARITHMETICS], None, frozenset()
    engine = load_engine(path)
    if checkpoint is None and any((golden / name).is_file() for name in (SINGLE_FILE, INDEX_FILE)):
        checkpoint = golden
    source, arithmetic = checkpoint_of(engine, checkpoint), engine.manifest.arithmetic
    reference = InterpretedSubject.of_engine(engine, source)
    interpreted = [reference] if arithmetic == "exact" else []
    made: list[Subject] = [EngineSubject(engine), *interpreted]
    quantized = frozenset(subject.name for subject in made) if is_quantized(engine) else frozenset()
    return [*made, EagerSubject.of_checkpoint(source, arithmetic)], reference, quantized


def _require_same_model(path: Path, config: ModelConfig, golden: Path) -> None:
    from v41c.frontend.config import read_config

    described = any((golden / name).is_file() for name in ("config.json", "hf_config.json"))
    if described and read_config(golden) != config:
        raise UsageError(f"{golden}: expected golden tensors of the model of {path}, found another configuration")


def _against_eager(
    engine: Engine,
    given: Path | None,
    tokens: Sequence[int] | None,
    prompt_tokens: int,
    decode_steps: int,
    progress: Progress,
) -> CompareReport:
    from v41c.interpreted import InterpretedSubject
    from v41c.origin import checkpoint_of
    from v41c.quantization import is_quantized

    if prompt_tokens < 1 or decode_steps < 0:
        raise UsageError(f"compare: expected a prompt and steps, got {prompt_tokens} tokens and {decode_steps} steps")
    source = checkpoint_of(engine, given)
    limit = engine.manifest.max_context
    steps = min(decode_steps, limit - 1)
    prompt = min(prompt_tokens, limit - steps)
    window = engine.manifest.window
    text = _default_tokens(engine, source, 3 * window + prompt + steps) if tokens is None else _given(tokens, steps)
    if tokens is not None:
        prompt = len(text) - steps
        if len(text) > limit:
            raise ContextError(f"tokens: expected at most {limit}, what the engine was compiled for, got {len(text)}")
    progress("loading the eager model")
    eager = EagerSubject.of_checkpoint(source, engine.manifest.arithmetic)
    reference = InterpretedSubject.of_engine(engine, source)
    phases, divergences = _phases(EngineSubject(engine), eager, reference, text[: prompt + steps], prompt, progress)
    progress("ced against full prefill")
    ced, reason = _ced(engine, text, [length for length in (window, 2 * window, 3 * window) if tokens is None], steps)
    quantized = divergences if is_quantized(engine) else []
    arithmetic = engine.manifest.arithmetic
    return CompareReport(str(engine.path), arithmetic, "eager model", phases, ced, reason, quantized)


def _given(tokens: Sequence[int], steps: int) -> Array:
    if len(tokens) <= steps:
        raise UsageError(f"tokens: expected more than the {steps} that are decoded, got {len(tokens)}")
    return np.array(tokens, np.int64)


def _default_tokens(engine: Engine, source: Path, count: int) -> Array:
    """Tokens of the checkpoint's own samples, again and again if they are few; without samples, seeded random ones."""
    from v41c.frontend.tokenizer import Tokenizer

    samples = source / "samples.txt"
    if samples.is_file() and engine.tokenizer_path is not None:
        text = samples.read_text(encoding="utf-8").partition("\n\n")[2]
        ids = Tokenizer(engine.tokenizer_path).encode(text)
        begin = [] if engine.manifest.bos_token is None else [engine.manifest.bos_token]
        return np.concatenate([begin, np.resize(ids, count)]).astype(np.int64)[:count]
    config = engine.manifest.config
    special = {config.get("image_token_id"), config.get("dspark_noise_token_id")}
    plain = [token for token in range(engine.manifest.vocabulary) if token not in special]
    return np.random.default_rng(0).choice(np.array(plain, np.int64), count)


def _phases(
    engine: Subject, eager: EagerSubject, reference: Subject, tokens: Array, prompt: int, progress: Progress
) -> tuple[list[Phase], list[DivergenceRow]]:
    """Phases, and how far the distributions of the engine, of its unfused graphs and of the floor are."""
    progress("the eager model")
    wanted = _feed(eager, tokens, prompt)
    progress("the eager model in other groups of tokens")
    floor = _feed(eager.grouped(FLOOR_CHUNK), tokens, prompt, decode_singly=False)
    progress("the engine")
    found = _feed(engine, tokens, prompt)
    progress("the engine, layer by layer")
    every = Notes()
    reference.start(len(tokens))
    unfused = reference.feed(tokens[:prompt], every)
    companions = {name: rows for name, rows in every.values.items() if name in engine.companions}
    forced = Notes(companions | {name: rows for name, rows in wanted[0].items() if name.rpartition(".")[2] in FORCED})
    engine.start(len(tokens))
    engine.feed(tokens[:prompt], forced)
    names = ("prefill", "decode")
    phases = [compare_phase(*given) for given in zip(names, found, wanted, floor, strict=True) if len(given[1])]
    alone = compare_phase("prefill, every layer fed the eager model's input", forced.values, wanted[0], floor[0])
    divergences = [divergence_row("prefill", "the same weights, interpreted", unfused, wanted[0]["logits"])]
    for name, *pairs in zip(names[: len(phases)], found, floor, wanted, strict=False):
        ours, grouped, right = (part["logits"] for part in pairs)
        divergences += [divergence_row(name, "engine", ours, right), divergence_row(name, _FLOOR, grouped, right)]
    return [phases[0], alone, *phases[1:]], divergences


def _feed(
    subject: Subject, tokens: Array, prompt: int, *, decode_singly: bool = True
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Landmarks and logits of the prompt, and of the tokens after it, one by one or as they are grouped."""
    subject.start(len(tokens))
    notes = Notes()
    logits = subject.feed(tokens[:prompt], notes)
    prefill = notes.values | {"logits": logits}
    rest = tokens[prompt:]
    if not len(rest):
        return prefill, {}
    if not decode_singly:
        notes = Notes()
        logits = subject.feed(rest, notes)
        return prefill, notes.values | {"logits": logits}
    steps: dict[str, list[Array]] = {}
    for token in rest:
        notes = Notes()
        row = subject.decode(int(token), notes)
        for name, rows in (notes.values | {"logits": row[None]}).items():
            steps.setdefault(name, []).append(rows)
    return prefill, {name: np.concatenate(parts) for name, parts in steps.items()}


def _ced(engine: Engine, tokens: Array, lengths: Sequence[int], steps: int) -> tuple[list[CedRow], str]:
    """Rows for the prompt lengths that the context has room for, and why there are none if there are none."""
    from v41c.runtime import schedules
    from v41c.runtime.session import Session

    reason = schedules.find("ced").why_not(engine)
    if reason is not None:
        return [], reason
    rows = []
    for length in lengths:
        if length + steps > engine.manifest.max_context:
            break
        results = []
        for mode in ("ced", "full"):
            session = Session(engine, max_context=length + steps)
            prefill = session.prefill(tokens[:length], mode=mode)[None]
            decode = [session.decode(int(token)) for token in tokens[length : length + steps]]
            results.append((prefill, np.stack(decode) if decode else prefill))
        ced, full = results
        rows.append(CedRow(length, logits_row(ced[0], full[0]), logits_row(ced[1], full[1])))
    return rows, "" if rows else "the context has no room for a prompt of the window's length"
