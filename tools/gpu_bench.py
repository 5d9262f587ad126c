"""Measures on a GPU what `tools/gpu_plan.py` lists, one JSON object a line as soon as it is known.

Kinds of lines: `ceilings`, what this GPU copies and multiplies at most; `kernel`, a kernel's time with the operation's
reference in eager PyTorch beside it, and how far their results are apart; `compile`, the reference under torch.compile.
Whoever runs this may end it at any time: what is most telling comes first.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tools.gpu_launch import Code, Loader, compile_ahead, compiled
from tools.gpu_operands import operands_of
from tools.gpu_plan import Case, boundary_bytes, boundary_cases, release_cases
from tools.gpu_timing import Timing, copies, measure, timing
from v41c.codegen.cuda.kernel import CudaKernel
from v41c.errors import DeviceError
from v41c.ir.ops.mhc_boundary import MhcBoundary
from v41c.ir.torch_types import torch_dtype
from v41c.runtime.cuda import Driver
from v41c.runtime.cuda_driver import CudaDriver
from v41c.targets.cuda import TARGETS, CudaTarget

if TYPE_CHECKING:
    from torch import Tensor

Operands = tuple["Tensor | None", ...]
Emit = Callable[[dict[str, Any]], None]

CONFIG = Path(__file__).parents[1] / "v41c" / "data" / "release" / "config.json"
#: references expand packed weights to f32: of more than this they are not run
REFERENCE_BYTES = 2 << 30
#: seconds of one call beyond which a reference is not timed again and again
REFERENCE_SECONDS = 0.5
#: results this far from the reference's are wrong: roundings to fp8 and bf16 differ by a few hundredths of the values
#: at most, choices of rows by a few in a hundred
MOST_APART = 0.1
#: kernels whose functions are compiled as one group
_GROUP = 24


def main(arguments: Sequence[str]) -> None:
    """`gpu_bench.py FILE`: append the lines to a file, progress to standard output."""
    with Path(arguments[0]).open("a", encoding="utf-8") as file:

        def emit(line: dict[str, Any]) -> None:
            file.write(json.dumps(line) + "\n")
            file.flush()

        driver = CudaDriver()
        target = next(target for target in TARGETS if target.capability == driver.capability)
        emit({"kind": "ceilings", **ceilings(), **sheet(target)})
        cases = ordered(release_cases(CONFIG, target, say), target)
        say(f"compiling {len(cases)} kernels")
        groups = [[case.kernel for case in cases[i : i + _GROUP]] for i in range(0, len(cases), _GROUP)]
        compile_ahead(groups, target)
        cache_bytes = int(torch.cuda.get_device_properties(0).L2_cache_size)
        bench = Bench(driver, lambda kernel: compiled([kernel], target), "cuda", cache_bytes)
        for case in cases:
            say(f"{case.name}, {case.tokens} tokens")
            emit(bench.kernel(case))
        for case in cases:
            emit(bench.compile(case))


def say(text: str) -> None:
    print(text, flush=True)


def ordered(cases: Sequence[Case], target: CudaTarget) -> list[Case]:
    """Boundaries alone, then step by step; within a step what moves most bytes first."""
    steps = sorted(cases, key=lambda case: (case.tokens, -case.calls * case.bytes))
    return [*boundary_cases(cases, target), *steps]


def ceilings(copied_bytes: int = 4 << 30, rows: int = 8192) -> dict[str, float]:
    """Bytes per second that a copy reads and writes, and operations per second of a bf16 product, by PyTorch."""
    source = torch.randint(0, 256, (copied_bytes,), dtype=torch.uint8, device="cuda")
    copying = time_torch(torch.empty_like(source).copy_, [(source,)])
    factors = [torch.randn(rows, rows, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    product = time_torch(torch.matmul, [factors])
    return {
        "copy_bytes_per_second": 2 * copied_bytes / copying.seconds,
        "bf16_flops_per_second": 2 * rows**3 / product.seconds,
    }


def sheet(target: CudaTarget) -> dict[str, Any]:
    """What a data sheet says of the memory of such a GPU, and of which product."""
    return {"product": target.product, "sheet_bytes_per_second": target.memory_bytes_per_second}


def time_torch(function: Callable[..., object], sets: Sequence[Sequence[object]]) -> Timing:
    """Seconds of a call, from enough calls in a row that the wait for the last does not count."""

    def calls(count: int) -> float:
        began = time.perf_counter()
        for number in range(count):
            function(*sets[number % len(sets)])
        synchronize()
        return (time.perf_counter() - began) / count

    calls(1)
    once = calls(1)
    count = max(1, min(200, int(0.02 / max(once, 1e-6))))
    return timing([calls(count) for _ in range(5)])


def synchronize() -> None:
    """Wait for what PyTorch has launched."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Bench:
    """Measures cases on one GPU; PyTorch allocates on `device`, the driver launches. `code` as `Loader` takes it."""

    def __init__(
        self, driver: Driver, code: Callable[[CudaKernel], Mapping[str, Code]], device: str, cache_bytes: int
    ) -> None:
        self._driver = driver
        self._loader = Loader(driver, code)
        self._device = device
        self._cache_bytes = cache_bytes
        self._broken = ""

    def kernel(self, case: Case) -> dict[str, Any]:
        """The line of a case; what could not be done is said in its notes."""
        line = describe("kernel", case)
        if self._broken:
            return line | {"error": f"not run: {self._broken} left the GPU unusable for this process"}
        try:
            line |= self._measured(case)
        except Exception as error:  # the next case may do
            line["error"] = one_line(error)
            self._broken = "" if self._usable() else case.name
        if not self._broken:
            torch.cuda.empty_cache()
        return line

    def _usable(self) -> bool:
        """Whether the process can still use the GPU: not after an access outside of all memory, for one."""
        try:
            self._driver.synchronize()
            synchronize()
        except (DeviceError, RuntimeError):
            return False
        return True

    def _measured(self, case: Case) -> dict[str, Any]:
        first = operands_of(case, self._device)
        held = sum(tensor.nbytes for tensor in first if tensor is not None)
        held += sum(kind.size_bytes for kind in case.results)
        count = copies(case.bytes, held, self._cache_bytes, self._room())
        sets = [first, *([clone(first) for _ in range(count - 1)])]
        eager, reason, wanted = self._eager(case, sets, held)
        outputs = [self._outputs(case) for _ in sets]
        scratch = torch.full((max(case.kernel.workspace_bytes, 1),), 0xFF, dtype=torch.uint8, device=self._device)
        counters = torch.zeros(max(case.kernel.counter_bytes, 1), dtype=torch.uint8, device=self._device)
        shared = {"workspace": scratch.data_ptr(), "counters": counters.data_ptr()}
        runs = [
            self._loader.bind(case.kernel, places(case, operands, made) | shared, case.dims)
            for operands, made in zip(sets, outputs, strict=True)
        ]
        synchronize()
        runs[0]()
        self._driver.synchronize()
        apart = difference(results(case, first, outputs[0]), wanted) if wanted is not None else None
        timed = measure(self._driver, runs)
        wrong = {} if apart is None or apart <= MOST_APART else {"error": f"its results are {apart:.1e} apart"}
        return wrong | {
            "seconds": timed.seconds,
            "spread": timed.spread,
            "sets": count,
            "bytes_per_second": case.bytes / timed.seconds,
            "flops_per_second": case.flops / timed.seconds,
            "apart": None if apart is None or not math.isfinite(apart) else apart,
            "eager_seconds": eager,
            "why_not_eager": reason,
        }

    def _room(self) -> int:
        """Bytes that the sets of one case may take, with as much again for what the reference is given."""
        return self._driver.free_bytes // 3

    def _outputs(self, case: Case) -> list[Tensor]:
        """Results that no kernel has written yet."""
        kinds = case.results[len(case.op.states) :]
        full = [torch.full((kind.size_bytes,), 0xFF, dtype=torch.uint8, device=self._device) for kind in kinds]
        return [
            tensor.view(torch_dtype(kind.dtype)).view([int(size) for size in kind.shape])
            for tensor, kind in zip(full, kinds, strict=True)
        ]

    def _eager(
        self, case: Case, sets: Sequence[Operands], held: int
    ) -> tuple[float | None, str, tuple[Tensor, ...] | None]:
        """Seconds of the reference or why there are none, and what it makes of the first set, which stays as it is."""
        if held > REFERENCE_BYTES:
            return None, f"operands of {held / 2**30:.1f} GiB", None
        try:
            with torch.inference_mode(), torch.device(self._device):
                began = time.perf_counter()
                wanted = case.op.reference(*clone(sets[0]))
                synchronize()
                took = time.perf_counter() - began
                if took > REFERENCE_SECONDS:
                    return took, "one call", wanted if isinstance(wanted, tuple) else (wanted,)
                timed = time_torch(case.op.reference, [clone(operands) for operands in sets[: max(1, len(sets) // 2)]])
        except Exception as error:  # whatever a reference that was written for CPUs meets
            return None, one_line(error), None
        return timed.seconds, "", wanted if isinstance(wanted, tuple) else (wanted,)

    def compile(self, case: Case) -> dict[str, Any]:
        """The line of the reference under torch.compile."""
        line = describe("compile", case)
        held = sum(kind.size_bytes for kind in case.types if kind is not None)
        if held > REFERENCE_BYTES or self._broken:
            return line | {"why_not_compile": self._broken or f"operands of {held / 2**30:.1f} GiB"}
        try:
            with torch.inference_mode(), torch.device(self._device):
                sets = [operands_of(case, self._device)]
                sets += [clone(sets[0]) for _ in range(copies(case.bytes, held, self._cache_bytes, self._room()) - 1)]
                torch._dynamo.reset()
                timed = time_torch(torch.compile(case.op.reference), sets)
        except Exception as error:  # whatever the compiler does not take
            return line | {"why_not_compile": one_line(error)}
        return line | {"compile_seconds": timed.seconds}


def describe(kind: str, case: Case) -> dict[str, Any]:
    """What tells a case from the others, and what it costs."""
    floor = {"least_bytes": boundary_bytes(case)} if isinstance(case.op, MhcBoundary) else {}
    return floor | {
        "kind": kind,
        "name": case.name,
        "symbol": case.kernel.symbol,
        "tokens": case.tokens,
        "calls": case.calls,
        "bytes": case.bytes,
        "flops": case.flops,
    }


def clone(operands: Operands) -> Operands:
    """The same values in other memory."""
    return tuple(None if tensor is None else tensor.clone() for tensor in operands)


def places(case: Case, operands: Operands, outputs: Sequence[Tensor]) -> dict[str, int]:
    """Addresses by the kernel's arguments."""
    declared = zip(case.op.operands(), operands, strict=True)
    found = {name.name: tensor.data_ptr() for name, tensor in declared if tensor is not None}
    return found | {f"result {index}": tensor.data_ptr() for index, tensor in enumerate(outputs)}


def results(case: Case, operands: Operands, outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """States as they are after a run, then the other results: the order of a reference's."""
    by_name = {declared.name: tensor for declared, tensor in zip(case.op.operands(), operands, strict=True)}
    states = [tensor for name in case.op.states if (tensor := by_name[name]) is not None]
    return (*states, *outputs)


def difference(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """The largest relative L2 of float results, or share of unequal integers; infinite where one is NaN."""
    found = list(_differences(ours, theirs))
    return math.inf if any(map(math.isnan, found)) else max(found, default=0.0)


def _differences(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> Iterator[float]:
    for left, right in zip(ours, theirs, strict=True):
        if right.is_floating_point():
            a, b = left.double(), right.double()
            yield float((a - b).norm() / b.norm().clamp(min=1e-30))
        else:
            yield _unequal(left, right)


def _unequal(left: Tensor, right: Tensor) -> float:
    """Share of unequal integers. Rows of i32 are choices in ascending order: one that differs moves many others, so of
    those the share that is not among the other's choices.
    """
    if right.dtype != torch.int32 or right.dim() != 2:
        return float((left != right).double().mean())
    rows = torch.arange(len(right), device=right.device)[:, None] << 32
    return 1 - float(torch.isin(rows + left, rows + right).double().mean())


def one_line(error: BaseException) -> str:
    """What an error says first."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:160]


if __name__ == "__main__":
    main(sys.argv[1:])
