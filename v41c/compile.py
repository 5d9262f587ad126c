"""The driver of a compilation: checkpoint → trace → passes → kernels → engine folder. Start reading here."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from v41c import __version__
from v41c.errors import MovedError, UsageError
from v41c.manifest import (
    CHAT_TEMPLATE_FILE,
    FORMAT_VERSION,
    TOKENIZER_FILE,
    WEIGHTS_FILE,
    Manifest,
    PassEntry,
    Program,
    WeightEntry,
)
from v41c.quantization import QuantizedWeight, measured, write_quantization

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from v41c.codegen.artifact import ProgramWriter
    from v41c.codegen.backend import Built
    from v41c.codegen.kernel import Kernel
    from v41c.frontend.checkpoint import Checkpoint
    from v41c.frontend.config import ModelConfig
    from v41c.frontend.tensor_names import TensorFormats
    from v41c.frontend.tokenizer import Tokenizer
    from v41c.ir.graph import Module
    from v41c.passes.context import PassContext
    from v41c.passes.pipeline import Stage
    from v41c.targets.target import Target
    from v41c.verify import VerifyReport

DEFAULT_CONTEXT = 4096
#: positions are 32-bit integers
MAX_CONTEXT = 2**31


@dataclass(frozen=True)
class CompileOptions:
    """What a user may choose. `passes` is the value of `--passes`; up to `slots` sequences of `max_context` tokens."""

    target: str = "cpu"
    arithmetic: Literal["release", "exact"] = "release"
    passes: str = "all"
    max_context: int | None = None
    slots: int = 8
    dump_ir: Path | None = None
    no_weights: bool = False
    verify: bool = False


@dataclass(frozen=True)
class CompileReport:
    """What a compilation did: seconds by phase, the ledger of the passes, kernels and sizes.

    `verification` is what the interpreter found about every pass, where it was asked.
    """

    engine: str
    target: str
    arithmetic: str
    seconds: dict[str, float]
    passes: list[PassEntry]
    pass_seconds: dict[str, float]
    kernels: int
    weight_bytes: int
    arena_bytes: dict[str, int] = field(default_factory=dict)
    quantization: list[QuantizedWeight] = field(default_factory=list)
    verification: VerifyReport | None = None


@dataclass(frozen=True)
class Source:
    """What is compiled: a configuration, and, unless without weights, its tensors, tokenizer and chat template."""

    config: ModelConfig
    formats: TensorFormats
    checkpoint: Checkpoint | None
    tokenizer: Tokenizer | None
    compressed_ids: npt.NDArray[np.int32] | None
    chat_template: str | None = None

    @property
    def engram_pad(self) -> int:
        """Compressed id of the pad token."""
        pad = self.config.engram_pad_id
        return pad if self.compressed_ids is None else int(self.compressed_ids[pad])

    @property
    def bos_token(self) -> int | None:
        """Begin token of the configuration, else of the tokenizer."""
        if self.config.bos_id is None and self.tokenizer is not None:
            return self.tokenizer.bos_id
        return self.config.bos_id

    @property
    def eos_tokens(self) -> list[int]:
        """End tokens of the configuration, else of the tokenizer: any of them ends a text."""
        return list(self.config.eos_ids or (self.tokenizer.eos_ids if self.tokenizer is not None else ()))


Progress = Callable[[str], None]


def compile(
    checkpoint: str | Path,
    engine: str | Path,
    options: CompileOptions | None = None,
    progress: Progress = lambda text: None,
    kernels: dict[str, Kernel] | None = None,
) -> CompileReport:
    """Compile a checkpoint folder, or a configuration without weights, into an engine folder.

    The folder appears complete or not at all, and equal inputs give equal bytes. Raises ConfigError, CheckpointError,
    TokenizerError, UnsupportedError, UsageError or ArtifactError; with `verify`, MovedError when a pass moves numbers
    that it must not move. `kernels` by symbol, of compilations for the same target, are not written again; new ones are
    added.
    """
    from v41c.codegen.artifact import new_folder
    from v41c.passes import quantize
    from v41c.passes.pipeline import choose_passes
    from v41c.targets.target import find_target
    from v41c.traces import kept_trace

    options, kernels = options or CompileOptions(), {} if kernels is None else kernels
    target = find_target(options.target)
    chosen = choose_passes(options.passes, target)
    clock = _Clock()
    progress("reading the checkpoint")
    source = read_source(Path(checkpoint), options.no_weights)
    if quantize.NAME in chosen:
        source = quantized_source(source)
    context_limit(source.config, options)
    if options.verify:
        _require_interpretable(source, Path(checkpoint))
    if options.dump_ir is not None:
        make_folder(options.dump_ir)
    clock.lap("read")
    with new_folder(Path(engine)) as folder:
        progress("tracing the eager model")
        trace = kept_trace(source)
        clock.lap("trace")
        context = pass_context(source.config, options, target, kernels)
        stages = run_passes(trace, context, chosen, folder / "graphs", options.dump_ir, progress)
        clock.lap("passes")
        verification = None
        if options.verify:
            verification = _verified(stages, source, progress)
            clock.lap("verify")
        writer, programs = _lower(stages[-1].module, kernels, chosen)
        used = [kernels[symbol] for symbol in sorted({c.kernel for p in programs for c in p.commands})]
        progress(f"compiling {len(used)} kernels")
        built = _build(used, target, writer.dims, folder, progress)
        clock.lap("kernels")
        manifest = _write(folder, source, options, target, writer, programs, built, stages, context.bounds, progress)
        clock.lap("weights")
    return CompileReport(
        engine=str(engine),
        target=target.name,
        arithmetic=options.arithmetic,
        seconds=clock.laps,
        passes=manifest.passes,
        pass_seconds={stage.name: stage.seconds for stage in stages} | {"trace": clock.laps["trace"]},
        kernels=len(used),
        weight_bytes=sum(weight.size_bytes for weight in manifest.weights),
        arena_bytes={f"{program.graph}:{program.max_tokens}": program.arena_bytes for program in programs},
        quantization=measured(source),
        verification=verification,
    )


def _require_interpretable(source: Source, path: Path) -> None:
    from v41c.verify import require_interpretable

    require_interpretable(source, path)


def _verified(stages: list[Stage], source: Source, progress: Progress) -> VerifyReport:
    """Every pass interpreted before and after; MovedError names the first that moved what it must not."""
    from v41c.verify import moved_text, verify_stages

    report = verify_stages(stages, source, progress)
    if report.failed:
        raise MovedError(moved_text(report.failed), report)
    return report


def make_folder(path: Path) -> None:
    """Make a folder for what the user asked to be written; UsageError where there can be none."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{path}: expected a folder to write to: {error.strerror}") from error


class _Clock:
    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._since = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name], self._since = now - self._since, now


def read_source(path: Path, no_weights: bool) -> Source:
    """Configuration, tensors and tokenizer, checked against each other."""
    from v41c.frontend.chat_template import read_chat_template
    from v41c.frontend.checkpoint import Checkpoint
    from v41c.frontend.config import read_config
    from v41c.frontend.tensor_names import TensorFormats
    from v41c.frontend.tokenizer import Tokenizer, compressed_ids

    if path.is_file() and not no_weights:
        raise UsageError(f"{path}: expected a checkpoint folder; give --no-weights to compile a configuration alone")
    config = read_config(path)
    if no_weights:
        return Source(config, TensorFormats.of(config), None, None, None)
    checkpoint = Checkpoint(path)
    checkpoint.verify(config)
    tokenizer = Tokenizer(path, config) if config.has_engram or (path / TOKENIZER_FILE).is_file() else None
    table = compressed_ids(tokenizer, config) if config.has_engram and tokenizer is not None else None
    template = None if tokenizer is None else read_chat_template(path)
    return Source(config, checkpoint.formats(config), checkpoint, tokenizer, table, template)


def quantized_source(source: Source) -> Source:
    """The source whose bf16 weights are read as the pass `quantize` types them."""
    from v41c.frontend.quantized_checkpoint import QuantizedCheckpoint

    if source.checkpoint is None:
        return source
    return replace(source, checkpoint=QuantizedCheckpoint(source.checkpoint.path, source.config))


def trace_source(source: Source) -> Module:
    """The traced module of a source."""
    from v41c.frontend.trace import trace

    return trace(source.config, source.formats, source.engram_pad)


def context_limit(config: ModelConfig, options: CompileOptions) -> int:
    """Most tokens of a sequence: what the user asks for, or the model's own limit up to a default."""
    if options.max_context is None:
        return min(config.max_position_embeddings or DEFAULT_CONTEXT, DEFAULT_CONTEXT)
    if not 1 <= options.max_context < MAX_CONTEXT:
        raise UsageError(f"max context: expected 1 to {MAX_CONTEXT - 1} tokens, got {options.max_context}")
    return options.max_context


def pass_context(
    config: ModelConfig, options: CompileOptions, target: Target, kernels: dict[str, Kernel]
) -> PassContext:
    """Options of the passes; selected kernels are collected in `kernels` by symbol."""
    from v41c.codegen.backend import backend_of
    from v41c.codegen.kernel import kernel_symbol
    from v41c.frontend.quantized_checkpoint import quantized_types
    from v41c.ir.op import Op
    from v41c.ir.types import TensorType
    from v41c.manifest import capacities
    from v41c.passes import quantize
    from v41c.passes.context import PassContext
    from v41c.passes.pipeline import choose_passes
    from v41c.runtime.images import Rules

    limit = context_limit(config, options)
    dims = [f"C{ratio}" for ratio in sorted(set(config.compress_ratios) - {0})]

    def select(
        op: Op,
        operands: tuple[TensorType | None, ...],
        results: tuple[TensorType, ...],
        bounds: Mapping[str, int],
    ) -> Kernel:
        symbol = kernel_symbol(op, operands, results, bounds)
        if symbol not in kernels:
            kernels[symbol] = backend_of(target).kernel_for(op, operands, results, target, bounds)
        return kernels[symbol]

    bounds = {"S": options.slots, **capacities(dims, limit)}
    quantized = quantized_types(config) if quantize.NAME in choose_passes(options.passes) else {}
    rules = Rules.of(config.to_flat())
    images = {} if rules is None else {"T": rules.max_patches, "R": rules.max_tokens}
    return PassContext(options.arithmetic, select, target.variants, bounds, quantized, target, images)


def run_passes(
    module: Module, context: PassContext, chosen: tuple[str, ...], graphs: Path, dump: Path | None, progress: Progress
) -> list[Stage]:
    """Every stage; their texts go into the engine and, on request, into another folder."""
    from v41c.passes.pipeline import run_pipeline, write_stage

    stages = []
    for number, stage in enumerate(run_pipeline(module, context, chosen, progress)):
        for folder in (graphs, dump):
            if folder is not None:
                write_stage(folder, number, stage)
        stages.append(stage)
    return stages


def _lower(module: Module, kernels: dict[str, Kernel], chosen: tuple[str, ...]) -> tuple[ProgramWriter, list[Program]]:
    from v41c.codegen.artifact import ProgramWriter
    from v41c.passes import plan_memory

    if plan_memory.NAME not in chosen:
        module = plan_memory.place_apart(module)
    writer = ProgramWriter(kernels)
    return writer, writer.programs(module)


def _build(kernels: list[Kernel], target: Target, dims: list[str], folder: Path, progress: Progress) -> Built:
    from v41c.cache import cache_folder
    from v41c.codegen.backend import Workshop, backend_of

    workshop = Workshop(cache_folder() / "kernels", progress)
    return backend_of(target).build_kernels(kernels, target, dims, folder, workshop)


def _write(
    folder: Path,
    source: Source,
    options: CompileOptions,
    target: Target,
    writer: ProgramWriter,
    programs: list[Program],
    built: Built,
    stages: list[Stage],
    bounds: Mapping[str, int],
    progress: Progress,
) -> Manifest:
    """Weights, tokenizer and manifest; everything else of the folder is there."""
    import shutil

    from v41c.codegen.artifact import file_entries, state_entries, write_manifest, write_weights
    from v41c.codegen.cpu.layouts import pack
    from v41c.frontend.weights import piece_reader
    from v41c.passes.split_encoder_decoder import why_not_ced

    weights = []
    if source.checkpoint is not None:
        read = piece_reader(source.checkpoint, source.compressed_ids)
        path = folder / WEIGHTS_FILE
        weights = write_weights(path, writer, read, pack, progress)
        write_quantization(folder, measured(source))
        if source.tokenizer is not None:
            shutil.copyfile(source.checkpoint.path / TOKENIZER_FILE, folder / TOKENIZER_FILE)
        if source.chat_template is not None:
            (folder / CHAT_TEMPLATE_FILE).write_text(source.chat_template, encoding="utf-8")
    module, config = stages[-1].module, source.config
    decoders = [graph for graph in module if graph.name.startswith("decoder")]
    reason = why_not_ced(decoders[0]) if decoders else "the engine was compiled without the pass split-encoder-decoder"
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        v41c_version=__version__,
        target=target.name,
        cpu_features=sorted(target.features),
        arithmetic=options.arithmetic,
        config=config.to_flat(),
        max_context=context_limit(config, options),
        slots=options.slots,
        dims=writer.dims,
        files=file_entries(folder),
        weights=weights or [WeightEntry(name, layout, 0, 0) for name, layout in writer.weights],
        states=state_entries(writer.states),
        programs=programs,
        passes=[_ledger(stage, bounds) for stage in stages],
        has_weights=source.checkpoint is not None,
        window=config.window_size,
        causal_encoder_decoder=not reason,
        why_not_ced=reason,
        vocabulary=config.vocab_size,
        eos_tokens=source.eos_tokens,
        bos_token=source.bos_token,
        draft_block=config.dspark_block_size if config.has_draft else 0,
        draft_noise_token=config.dspark_noise_token_id if config.has_draft else None,
        cuda_capability=target.capability,
        counter_bytes=max((writer.kernels[c.kernel].counter_bytes for p in programs for c in p.commands), default=0),
        cubins=built.cubins,
        launches=built.launches,
    )
    write_manifest(folder, manifest)
    return manifest


def _ledger(stage: Stage, bounds: Mapping[str, int]) -> PassEntry:
    from v41c.passes.pipeline import decode_cost

    operations, cost = decode_cost(stage.module, bounds)
    return PassEntry(
        name=stage.name,
        operations=operations,
        launches=cost.launches,
        flops=cost.flops,
        weight_bytes=cost.weight_bytes,
        state_bytes=cost.state_bytes,
        activation_bytes=cost.activation_bytes,
    )
