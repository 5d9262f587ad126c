"""One page to look at an engine with: layers, pipeline, costs, operations, memory and figures, in one file.

The page holds what `v41c inspect --json` and `v41c report --json` print, as JSON, and draws it with plain scripts: it
opens from a disk, needs no network and runs nothing that came with a checkpoint.
"""

from __future__ import annotations

import html
import importlib.resources
import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from v41c.inspect import engine_report
from v41c.layers import layer_of
from v41c.memory import memory_plan
from v41c.operations import operations
from v41c.report import DEFAULT_CONTEXT, stages_report
from v41c.runtime.artifact import Engine, load
from v41c.stage_diff import GraphDiff, stage_diff
from v41c.stages import Stages, engine_stages
from v41c.terminal import bytes_text

#: lines of a difference that the page shows; `v41c inspect --diff` has them all
DIFF_LINES = 400
_PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}")
_SCRIPTS = ("base", "map", "pipeline", "costs", "layout", "graph", "scene", "operation", "memory", "search", "main")


@dataclass(frozen=True)
class PageReport:
    """A page that was written."""

    engine: str
    file: str
    size_bytes: int

    def to_json(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        return asdict(self)

    def summary(self) -> str:
        """The same for people."""
        return f"{self.file} ({bytes_text(self.size_bytes)}): open it with a browser"


def write_page(engine: str | Path, file: str | Path) -> PageReport:
    """Write the page of an engine. ArtifactError for a folder that is no engine."""
    content = page(load(engine), str(engine)).encode("utf-8")
    Path(file).write_bytes(content)
    return PageReport(str(engine), str(file), len(content))


def page(engine: Engine, name: str) -> str:
    """The page's text."""
    parts = {
        "title": html.escape(f"{Path(name).name} · v41c"),
        "style": _asset("style.css"),
        "data": _json(page_data(engine, name)),
        "script": "\n".join(_asset(f"{script}.js") for script in _SCRIPTS),
    }
    return _PLACEHOLDER.sub(lambda found: parts[found[1]], _asset("page.html"))


def page_data(engine: Engine, name: str) -> dict[str, Any]:
    """What the page shows.

    `inspect` and `report` are what the commands print with --json, `graphs` the operations as `inspect --layer` lists
    them, `changes` the differences between neighbouring stages as `inspect --diff` gives them, `memory` a plan per
    program.
    """
    stages = engine_stages(engine)
    report = stages_report(name, "engine", stages, DEFAULT_CONTEXT)
    neighbours = zip(stages.names, stages.names[1:], strict=False)
    return {
        "inspect": engine_report(engine, stages, name).to_json(),
        "report": report.to_json(),
        "titles": {figure.key: figure.title for figure in report.figures},
        "units": {figure.key: figure.unit for figure in report.figures},
        "graphs": [
            {"name": graph.name, "operations": msgspec.to_builtins(list(operations(graph, stages.unfused)))}
            for graph in stages.last
        ],
        "changes": [
            asdict(replace(diff, graphs=[_shortened(graph) for graph in diff.graphs]))
            for diff in (stage_diff((old, stages[old]), (new, stages[new])) for old, new in neighbours)
        ],
        "memory": list(_memory(stages)),
    }


def _memory(stages: Stages) -> Iterator[dict[str, Any]]:
    for graph in stages.last:
        layers = [layer_of(node.origin.module) for node in graph.nodes]
        yield {"graph": graph.name, "layers": layers, **asdict(memory_plan(graph, stages.plans_memory))}


def _shortened(graph: GraphDiff) -> GraphDiff:
    left_out = len(graph.lines) - DIFF_LINES
    return graph if left_out <= 0 else replace(graph, lines=[*graph.lines[:DIFF_LINES], f"@@ {left_out} more lines @@"])


def _json(data: dict[str, Any]) -> str:
    """JSON that may stand inside a script element."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _asset(name: str) -> str:
    return (importlib.resources.files("v41c") / "page" / name).read_text(encoding="utf-8").strip()
