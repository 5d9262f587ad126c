"""The driver of `v41c inspect ENGINE --kernels`: machine code and bounds of time of a CUDA engine, layers' launches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from v41c.errors import UsageError
from v41c.kernels import KernelRow, kernel_rows
from v41c.layers import layer_plan
from v41c.operations import Operation, operations, wanted_graph
from v41c.runtime.artifact import load
from v41c.stages import engine_stages, is_backbone, variant
from v41c.targets.cuda import CudaTarget
from v41c.targets.target import find_target
from v41c.terminal import bytes_text, flops_text, table


@dataclass(frozen=True)
class StepKernels:
    """Kernels of steps of up to `tokens` tokens, through the graphs named: `decoder:1`, …

    Costs are those of the largest step at the full context. `layer_launches` by layer name.
    """

    tokens: int
    graphs: list[str]
    kernels: list[KernelRow]
    layer_launches: dict[str, int]

    @property
    def launches(self) -> int:
        """Of all kernels."""
        return sum(row.launches for row in self.kernels)

    @property
    def bound_seconds(self) -> float:
        """The least time of all kernels, launches aside."""
        return sum(row.bound_seconds for row in self.kernels)


@dataclass(frozen=True)
class KernelReport:
    """The kernels of an engine by size of step; `product` is the hardware that bounds of time are of."""

    engine: str
    target: str
    product: str
    modes: dict[str, str]
    steps: list[StepKernels]

    def to_json(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        totals = [{"launches": step.launches, "bound_seconds": step.bound_seconds} for step in self.steps]
        plain = asdict(self)
        return plain | {"steps": [step | total for step, total in zip(plain["steps"], totals, strict=True)]}

    def summary(self) -> str:
        """Tables for people."""
        return "\n".join(_lines(self))


def kernel_report(engine: str | Path, graph: str | None = None) -> KernelReport:
    """The kernels of a CUDA engine, of the backbone or of one graph; UsageError for a CPU engine or no such graph."""
    loaded = load(engine)
    manifest = loaded.manifest
    if not manifest.cubins:
        raise UsageError(f"{engine}: --kernels: expected a CUDA engine, got one for {manifest.target}")
    target = find_target(manifest.target)
    if not isinstance(target, CudaTarget):
        raise UsageError(f"{engine}: expected a CUDA target, got {manifest.target}")
    stages = engine_stages(loaded)
    chosen = [one for one in stages.last if (wanted_graph(one, graph) if graph is not None else is_backbone(one))]
    if not chosen:
        raise UsageError(f"graph: expected one of {', '.join(one.name for one in stages.last)}, got {graph!r}")
    steps = []
    for tokens in sorted({variant(one)[1] or 0 for one in chosen}):
        graphs = [one for one in chosen if variant(one)[1] == tokens]
        found = [operation for one in graphs for operation in operations(one, stages.unfused)]
        launches = {kernel: len(manifest.launches[kernel]) for kernel in manifest.launches}
        rows = kernel_rows(found, manifest.launches, manifest.cubins, target)
        steps.append(StepKernels(tokens, [one.name for one in graphs], rows, _by_layer(found, launches)))
    modes: dict[str, str] = {layer.name: layer.mode for layer in layer_plan(stages.halves)}
    return KernelReport(str(engine), manifest.target, target.product, modes, steps)


def _by_layer(found: list[Operation], launches: dict[str, int]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for operation in found:
        if operation.kernel is not None and operation.layer:
            counts[operation.layer] = counts.get(operation.layer, 0) + launches[operation.kernel]
    return counts


def _lines(report: KernelReport) -> Iterator[str]:
    yield f"{report.engine} for {report.target}; bounds of time are of the {report.product}"
    for step in report.steps:
        yield ""
        yield (
            f"steps of up to {step.tokens} tokens ({', '.join(step.graphs)}): {step.launches} launches, "
            f"at least {_time(step.bound_seconds)} and the launches"
        )
        yield table(
            (
                *("operation", "calls", "launches", "registers", "spilled", "shared", "occupancy"),
                *("bytes", "arithmetic", "at least", "instructions of note"),
            ),
            [_cells(row) for row in step.kernels],
        )
    yield ""
    yield "launches of a layer"
    yield table(
        ("layer", "mode", *(f"≤ {step.tokens} tokens" for step in report.steps)),
        [
            (name, report.modes.get(name, ""), *(str(step.layer_launches.get(name, 0)) for step in report.steps))
            for name in dict.fromkeys(name for step in report.steps for name in step.layer_launches)
        ],
    )


def _cells(row: KernelRow) -> tuple[str, ...]:
    return (
        row.op,
        str(row.calls),
        str(row.launches),
        str(row.registers),
        bytes_text(row.spill_bytes) if row.spill_bytes else "",
        bytes_text(row.shared_bytes),
        f"{row.occupancy:.0%}",
        bytes_text(row.bytes),
        flops_text(row.flops),
        _time(row.bound_seconds),
        ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in sorted(row.instructions.items())),
    )


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"
