"""The order of the passes, and running them: verified after each, timed, dumped on request."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from v41c.errors import UsageError
from v41c.ir.graph import Module
from v41c.ir.op import Cost
from v41c.ir.text import print_module
from v41c.passes import (
    fuse_attention,
    fuse_mhc,
    fuse_moe,
    merge_projections,
    pack_activations,
    plan_memory,
    quantize,
    remove_quantization,
    reorder_sparse_gathers,
    restrict_candidates,
    select_kernels,
    share_index_scores,
    split_encoder_decoder,
)
from v41c.passes.context import EXACT, Machine, Numbers, PassContext

#: every pass in order, and why it stands there
PIPELINE: tuple[tuple[ModuleType, str], ...] = (
    (quantize, "first: the rest cannot tell the model from one that is stored in the release's formats"),
    (remove_quantization, "before the rest: what follows sees one arithmetic only"),
    (split_encoder_decoder, "before any fusion could join operations across the cut"),
    (restrict_candidates, "early: its operation is the traced one's, restricted, and no fusion looks at it"),
    (share_index_scores, "early too: no fusion looks at what it joins"),
    (fuse_mhc, "before other fusions could take the boundary's round trip"),
    (fuse_moe, "before merged projections could take the shared expert's first two"),
    (merge_projections, "after the cut, which tells whose projections stand together"),
    (fuse_attention, "after merged projections: the norms it joins then read results of one operation"),
    (pack_activations, "after the last fusion: who reads what a boundary writes is settled"),
    (select_kernels, "after the last rewrite that serves any number of tokens"),
    (reorder_sparse_gathers, "after variants are made: what pays for one token does not for many"),
    (plan_memory, "last: it places what the kernels need"),
)
#: passes that run only when they are asked for, or on machines of which their `is_default` says so
OPT_IN = (quantize.NAME, pack_activations.NAME)
REQUIRED = (remove_quantization.NAME, select_kernels.NAME)
TRACE = "trace"


@dataclass(frozen=True)
class Stage:
    """The module after a pass, and the seconds the pass took."""

    name: str
    module: Module
    seconds: float


def numbers_of(name: str) -> Numbers:
    """What a pass may do to the numbers."""
    (entry,) = (entry for entry, _ in PIPELINE if name == entry.NAME)
    numbers: Numbers = getattr(entry, "NUMBERS", EXACT)
    return numbers


def pass_names(machine: Machine | None = None) -> tuple[str, ...]:
    """Names of the passes that run unless they are left out, in order: on a machine, or on any."""
    return tuple(entry.NAME for entry, _ in PIPELINE if _is_default(entry, machine))


def _is_default(entry: ModuleType, machine: Machine | None) -> bool:
    if entry.NAME not in OPT_IN:
        return True
    return machine is not None and hasattr(entry, "is_default") and bool(entry.is_default(machine))


def choose_passes(text: str, machine: Machine | None = None) -> tuple[str, ...]:
    """Passes of a `--passes` value: "all" those on by default on the machine, or names to add ("+quantize") and to
    leave out ("-plan-memory"), or the names to run.

    Any default pass but the required ones may be left out: none of them needs what another leaves behind.

    UsageError for no entry at all; it names an unknown pass, one that is added and left out, a mixture with names to
    run, or a required pass that is missing.
    """
    names = tuple(entry.NAME for entry, _ in PIPELINE)
    if not text.strip(" ,"):
        raise UsageError("--passes: expected all, names to run, or changes (+name, -name) to what runs, got none")
    entries = [entry for entry in text.split(",") if entry and entry != "all"]
    for entry in entries:
        name = entry[1:] if entry[0] in "+-" else entry
        if name not in names:
            raise UsageError(f"--passes: unknown pass {name}: expected one of {', '.join(names)}")
    added, left_out = ({entry[1:] for entry in entries if entry[0] == sign} for sign in "+-")
    wanted = {entry for entry in entries if entry[0] not in "+-"}
    if wanted and (added or left_out):
        raise UsageError("--passes: expected names to run, or changes (+name, -name) to what runs, got both")
    for name in sorted(added & left_out):
        raise UsageError(f"--passes: {name}: expected it to be added or left out, got both")
    running = wanted or {*pass_names(machine), *added} - left_out
    chosen = tuple(name for name in names if name in running)
    for name in REQUIRED:
        if name not in chosen:
            raise UsageError(f"--passes: {name} cannot be left out: an engine needs it")
    return chosen


def run_pipeline(
    module: Module,
    context: PassContext,
    chosen: Iterable[str],
    progress: Callable[[str], None] = lambda text: None,
) -> Iterator[Stage]:
    """Stages after the trace and after each chosen pass, every one verified."""
    wanted = set(chosen)
    module.verify()
    yield Stage(TRACE, module, 0.0)
    for entry in (entry for entry, _ in PIPELINE if entry.NAME in wanted):
        progress(f"pass {entry.NAME}")
        begin = time.perf_counter()
        module = entry.run(module, context)
        module.verify()
        yield Stage(entry.NAME, module, time.perf_counter() - begin)


def write_stage(folder: Path, number: int, stage: Stage) -> None:
    """Write the text of a stage as NN_<pass>.ir."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{number:02d}_{stage.name}.ir").write_text(print_module(stage.module))


def decode_cost(module: Module, bounds: Mapping[str, int]) -> tuple[int, Cost]:
    """Operations, and cost of one decoded token at a full context, over the backbone's graphs (one variant of each)."""
    dims = {**bounds, "T": 1, "R": 1}
    operations, total = 0, Cost()
    seen: set[str] = set()
    for graph in module:
        base = graph.name.partition(":")[0]
        if base.startswith(("draft", "vision")) or base in seen:
            continue
        seen.add(base)
        operations += len(graph.nodes)
        total += graph.cost(dims)
    return operations, total
