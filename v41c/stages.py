"""The graphs of a model as they stood after each pass: from an engine's folder without torch, or by tracing."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from v41c.errors import UsageError
from v41c.ir.graph import Graph, Module
from v41c.ir.op import Op
from v41c.ir.text import parse_module
from v41c.ir.types import TensorType
from v41c.manifest import MANIFEST_FILE
from v41c.passes import plan_memory, remove_quantization, select_kernels, split_encoder_decoder
from v41c.passes.context import Kernel, PassContext
from v41c.runtime.artifact import Engine, load

if TYPE_CHECKING:
    from v41c.compile import Source

_STAGE_FILE = re.compile(r"graphs/(\d+)_(.+)\.ir")


class Stages:
    """The module after the trace and after each pass, by the pass's name; read when it is first asked for."""

    def __init__(self, readers: Mapping[str, Callable[[], Module]]) -> None:
        """`readers` give the modules, in the order of the passes."""
        self._readers = readers
        self._read: dict[str, Module] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """`trace`, then the passes that ran, in order."""
        return tuple(self._readers)

    def __getitem__(self, name: str) -> Module:
        """The module after a pass; UsageError names those there are."""
        if name not in self._readers:
            raise UsageError(f"pass: expected one of {', '.join(self.names)}, got {name!r}")
        if name not in self._read:
            self._read[name] = self._readers[name]()
        return self._read[name]

    @property
    def last(self) -> Module:
        """What the engine runs."""
        return self[self.names[-1]]

    @property
    def unfused(self) -> Module:
        """The engine's graphs as they stood before any operation was rewritten, in its arithmetic."""
        cut = split_encoder_decoder.NAME in self.names
        return self[split_encoder_decoder.NAME if cut else remove_quantization.NAME]

    @cached_property
    def halves(self) -> Module:
        """The same as encoder, decoder and draft graphs, whether the engine is cut so or not."""
        return split_encoder_decoder.run(self.unfused, WITHOUT_KERNELS)

    @property
    def plans_memory(self) -> bool:
        """Whether values share places in the arena."""
        return plan_memory.NAME in self.names


def engine_stages(engine: Engine) -> Stages:
    """The stages that an engine's folder holds; nothing but their texts is read."""

    def reader(name: str) -> Callable[[], Module]:
        return lambda: parse_module((engine.path / name).read_text(encoding="utf-8"))

    return Stages({stage: reader(name) for stage, name in _stage_files(engine).items()})


def stage_file(engine: Engine, after: str) -> str:
    """Name of the file of a stage in the engine's folder; UsageError names the passes there are."""
    files = _stage_files(engine)
    if after not in files:
        raise UsageError(f"pass: expected one of {', '.join(files)}, got {after!r}")
    return files[after]


def _stage_files(engine: Engine) -> dict[str, str]:
    return {found[2]: name for name in sorted(engine.manifest.files) if (found := _STAGE_FILE.fullmatch(name))}


def model_stages(path: Path) -> Stages:
    """The stages before kernels are selected of a configuration or checkpoint, traced now. Imports torch."""
    from v41c.compile import CompileOptions, pass_context
    from v41c.passes.pipeline import pass_names, run_pipeline
    from v41c.targets.target import find_target
    from v41c.traces import kept_trace

    source = _source(path)
    names = pass_names()
    graph_passes = names[: names.index(select_kernels.NAME)]
    context = pass_context(source.config, CompileOptions(), find_target("cpu:x86-64-v3"), {})
    stages = run_pipeline(kept_trace(source), context, graph_passes)
    return Stages({stage.name: _given(stage.module) for stage in stages})


def stages_of(path: Path) -> tuple[str, Stages]:
    """What a path is ("engine", "checkpoint" or "config"), and its stages."""
    if (path / MANIFEST_FILE).is_file():
        return "engine", engine_stages(load(path))
    return ("checkpoint" if _has_weights(path) else "config"), model_stages(path)


def variant(graph: Graph) -> tuple[str, int | None]:
    """Name of a graph without its number of tokens, and that number once kernels are selected."""
    base, _, tokens = graph.name.partition(":")
    return base, int(tokens) if tokens else None


def is_backbone(graph: Graph) -> bool:
    """Whether every token goes through the graph: it is none of the draft head or of the vision tower."""
    return not graph.name.startswith(("draft", "vision"))


def chosen_graphs(module: Module, tokens: str) -> dict[str, Graph]:
    """One variant of every graph by its bare name: that of the "fewest" tokens (decode) or of the "most" (a chunk)."""
    found: dict[str, Graph] = {}
    for graph in sorted(module, key=lambda graph: variant(graph)[1] or 0, reverse=tokens == "most"):
        found.setdefault(variant(graph)[0], graph)
    return {variant(graph)[0]: found[variant(graph)[0]] for graph in module}


def _given(module: Module) -> Callable[[], Module]:
    return lambda: module


def _source(path: Path) -> Source:
    from v41c.compile import read_source

    return read_source(path, no_weights=not _has_weights(path))


def _has_weights(path: Path) -> bool:
    return path.is_dir() and any(path.glob("*.safetensors"))


def _no_kernel(
    op: Op, operands: tuple[TensorType | None, ...], results: tuple[TensorType, ...], bounds: Mapping[str, int]
) -> Kernel:
    raise UsageError(f"{op.name()}: a pass that only rewrites graphs asked for a kernel")


#: for passes that rewrite graphs whatever the target
WITHOUT_KERNELS = PassContext("release", _no_kernel, (1,))
