"""What is measured on a GPU: every kernel of a release's steps, at its real shapes, and residual boundaries alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from v41c.codegen.backend import backend_of
from v41c.codegen.cuda.kernel import CudaKernel
from v41c.compile import CompileOptions, pass_context, read_source
from v41c.ir.graph import Graph, Module, Node
from v41c.ir.op import Op, cost_of
from v41c.ir.ops.mhc_boundary import MhcBoundary
from v41c.ir.types import TensorType
from v41c.passes.pipeline import choose_passes, run_pipeline
from v41c.stages import is_backbone, variant
from v41c.targets.cuda import CudaTarget
from v41c.traces import kept_trace

#: tokens of a sequence: enough for the indexers to have something to choose from
CONTEXT = 32_768
#: residual boundaries are measured at these numbers of tokens
BOUNDARIES = (64, 4096)
#: rows of a table that are kept where all of it would not fit: still far more than a cache holds
TABLE_BYTES = 8 << 30


@dataclass(frozen=True)
class Case:
    """A kernel of a step of `tokens` tokens, which runs it `calls` times; `types` with every size a number.

    `flops` and `bytes` are the operation's own count of what it needs, whatever the kernel does.
    """

    op: Op
    tokens: int
    calls: int
    types: tuple[TensorType | None, ...]
    results: tuple[TensorType, ...]
    dims: Mapping[str, int]
    kernel: CudaKernel
    flops: int
    bytes: int

    @property
    def name(self) -> str:
        """The operation and its weight's or first operand's shape, to tell cases of one step apart."""
        shapes = [kind.shape for kind in self.types if kind is not None]
        matrices = [shape for shape in shapes[1:2] if len(shape) == 2 and shape[0] != self.tokens]
        shape = (matrices or shapes)[0]
        return f"{self.op.name()} {'x'.join(map(str, shape))}"


def release_cases(config: Path, target: CudaTarget, progress: Callable[[str], None]) -> list[Case]:
    """Every kernel of the steps of one sequence, of as many tokens as the target's programs take, most tokens last."""
    progress("tracing the release's model")
    source = read_source(config, no_weights=True)
    kernels: dict[str, object] = {}
    options = CompileOptions(target=target.name, no_weights=True, max_context=CONTEXT)
    context = pass_context(source.config, options, target, kernels)  # type: ignore[arg-type]
    stages = list(run_pipeline(kept_trace(source), context, choose_passes(options.passes, target), progress))
    return cases_of(stages[-1].module, kernels)


def cases_of(module: Module, kernels: Mapping[str, object]) -> list[Case]:
    """A case for every kernel of the backbone's graphs."""
    found: dict[tuple[int, str], Case] = {}
    for graph in sorted(filter(is_backbone, module), key=lambda graph: variant(graph)[1] or 0):
        for node in graph.nodes:
            if node.kernel is not None:
                key = variant(graph)[1] or 0, node.kernel.symbol
                kernel = kernels[node.kernel.symbol]
                made = found.get(key) or _case(graph, node, kernel)  # type: ignore[arg-type]
                found[key] = replace(made, calls=made.calls + 1)
    return list(found.values())


def _case(graph: Graph, node: Node, kernel: CudaKernel) -> Case:
    operands = tuple(None if value is None else value.type for value in node.operands)
    return case_of(node.op, operands, {"T": variant(graph)[1] or 0} | dict(graph.bounds), kernel)


def case_of(op: Op, operands: Sequence[TensorType | None], dims: Mapping[str, int], kernel: CudaKernel) -> Case:
    """The case of one kernel, run no time yet."""
    types = tuple(operands)
    results = op.infer_results(types)
    cost = cost_of(op, types, results, ("activation",) * len(types), dims)
    return Case(
        op=op,
        tokens=dims["T"],
        calls=0,
        types=tuple(None if kind is None else kind.bind(dims) for kind in types),
        results=tuple(kind.bind(dims) for kind in results),
        dims=dims,
        kernel=kernel,
        flops=cost.flops,
        bytes=cost.activation_bytes,
    )


def boundary_cases(cases: Sequence[Case], target: CudaTarget) -> list[Case]:
    """The residual boundary of a release at other numbers of tokens."""
    some = next((case for case in cases if isinstance(case.op, MhcBoundary)), None)
    if some is None:
        return []
    made = []
    for tokens in BOUNDARIES:
        types = tuple(
            None if kind is None else TensorType(kind.dtype, ("T", *kind.shape[1:])) if index < 5 else kind
            for index, kind in enumerate(some.types)
        )
        dims = {"T": tokens}
        kernel = backend_of(target).kernel_for(some.op, types, some.op.infer_results(types), target, dims)
        made.append(replace(case_of(some.op, types, dims, kernel), calls=1))  # type: ignore[arg-type]
    return made


def boundary_bytes(case: Case) -> int:
    """What a residual boundary cannot do without: (2n + 2) · d values of 2 bytes a token, and the weight once.

    The stream in and out, the sublayer's output, the next one's input. The operation moves d more where both the input
    and what is left of it in a quantised format are wanted, and the shares of the copies.
    """
    stream, weight = case.types[0], case.types[5]
    if stream is None or weight is None:
        raise ValueError(f"{case.name}: expected a residual boundary")
    tokens, copies, width = (int(size) for size in stream.shape)
    return tokens * (2 * copies + 2) * width * 2 + weight.size_bytes


def capped(kind: TensorType) -> TensorType:
    """A type of which a GPU can hold several: a huge table's first rows."""
    if kind.size_bytes <= TABLE_BYTES:
        return kind
    rows = TABLE_BYTES * int(kind.shape[0]) // kind.size_bytes
    return TensorType(kind.dtype, (rows, *kind.shape[1:]))
