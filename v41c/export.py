"""The driver of `v41c export`: a graph of an engine as an ONNX model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from v41c import __version__
from v41c.errors import UsageError
from v41c.runtime.artifact import Engine, load
from v41c.stages import Stages, chosen_graphs, engine_stages
from v41c.terminal import bytes_text

if TYPE_CHECKING:
    from v41c.codegen.onnx.model import ReadWeight
    from v41c.ir.graph import Graph

DEFAULT_GRAPH = "model"
Progress = Callable[[str], None]


@dataclass(frozen=True)
class ExportReport:
    """What was written. `functions` are local; an operation has several where bodies differ with attributes or types.

    `checkpoint` is where the weights are from; without one they are inputs of the model.
    """

    engine: str
    file: str
    data_file: str | None
    size_bytes: int
    graph: str
    after: str
    opset: int
    nodes: int
    functions: list[str]
    inputs: list[str]
    outputs: list[str]
    weights: int
    checkpoint: str | None

    def to_json(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        return asdict(self)

    def summary(self) -> str:
        """The same for people."""
        weights = f"from {self.checkpoint}" if self.checkpoint else "left as inputs: --checkpoint puts them in"
        beside = f" and {self.data_file}" if self.data_file else ""
        return "\n".join(
            (
                f"written    {self.file}{beside} ({bytes_text(self.size_bytes)})",
                f"graph      {self.graph} after {self.after}, ONNX operator set {self.opset}",
                f"nodes      {self.nodes}, calls of {len(self.functions)} local functions",
                f"inputs     {len(self.inputs)}, outputs {len(self.outputs)}",
                f"weights    {self.weights} {weights}",
            )
        )


def export(
    engine: str | Path,
    file: str | Path,
    after: str | None = None,
    graph: str | None = None,
    checkpoint: Path | None = None,
    progress: Progress = lambda text: None,
) -> ExportReport:
    """Write a graph as it stood after a pass, by default the last one after which it is there, to an ONNX file.

    Weights are those of `checkpoint`, or of the shipped one when the engine was made of it; else they are inputs of
    the model. UsageError names the passes or graphs there are, or says that a checkpoint is not the engine's.
    """
    from v41c.codegen.onnx.body import OPSET
    from v41c.codegen.onnx.model import build, save

    loaded, path = load(engine), Path(file)
    progress("reading the graphs")
    stages = engine_stages(loaded)
    stage, chosen = _choose(stages, after, graph or DEFAULT_GRAPH)
    source = _checkpoint(loaded, checkpoint)
    progress("writing the model")
    arithmetic = loaded.manifest.arithmetic
    model = build(chosen, {"v41c": __version__, "graph": chosen.name, "pass": stage, "arithmetic": arithmetic})
    try:
        data = save(model, path, chosen.weights, None if source is None else _reader(loaded, source))
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from error
    return ExportReport(
        engine=str(engine),
        file=str(path),
        data_file=None if data is None else str(data),
        size_bytes=path.stat().st_size + (0 if data is None else data.stat().st_size),
        graph=chosen.name,
        after=stage,
        opset=OPSET,
        nodes=len(model.graph.node),
        functions=sorted(function.name for function in model.functions),
        inputs=[value.name for value in model.graph.input],
        outputs=[value.name for value in model.graph.output],
        weights=len(chosen.weights),
        checkpoint=None if source is None else str(source),
    )


def _choose(stages: Stages, after: str | None, name: str) -> tuple[str, Graph]:
    """Stage and graph; a graph that is compiled for several numbers of tokens is the same in all of them."""
    names = stages.names if after is None else (after,)
    found: set[str] = set()
    for stage in reversed(names):
        graphs = {graph.name: graph for graph in stages[stage]} | chosen_graphs(stages[stage], "most")
        if name in graphs:
            return stage, graphs[name]
        found |= graphs.keys()
    where = "" if after is None else f" after {after}"
    raise UsageError(f"graph: expected one of {', '.join(sorted(found))}{where}, got {name!r}")


def _checkpoint(engine: Engine, given: Path | None) -> Path | None:
    """The folder of the engine's weights, None when it is not known."""
    from v41c.frontend.config import parse_config, read_config
    from v41c.origin import checkpoint_of

    if engine.manifest.has_weights:
        with nullcontext() if given else suppress(UsageError):
            return checkpoint_of(engine, given)
    elif given is not None and read_config(given) != parse_config(engine.manifest.config, str(engine.path)):
        raise UsageError(f"{given}: expected the checkpoint of {engine.path}, found another configuration")
    return given


def _reader(engine: Engine, checkpoint: Path) -> ReadWeight:
    from v41c.frontend.weights import array_reader
    from v41c.origin import source_of

    source = source_of(engine, checkpoint)
    if source.checkpoint is None:
        raise UsageError(f"{checkpoint}: expected a checkpoint folder, got a configuration alone")
    return array_reader(source.checkpoint, source.compressed_ids)
