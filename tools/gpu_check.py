"""Checks and measures v41c on the machine's GPU within ten minutes: `python tools/gpu_check.py --help`."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
#: of all steps together
SECONDS = 600.0
#: packages without which nothing here runs, by the module that is imported
PACKAGES = {
    "numpy": "numpy",
    "torch": "torch",
    "triton": "triton",
    "msgspec": "msgspec",
    "ml_dtypes": "ml_dtypes",
    "safetensors": "safetensors",
    "tokenizers": "tokenizers",
    "cuda.bindings": "cuda-bindings",
    "pytest": "pytest",
}
HELP = """
steps, in this order:
  facts      the GPU, its driver, and the packages that are used
  kernels    tests/device: every kernel against its reference, between red zones
  engines    tests/device: golden tensors, greedy tokens, replayed graphs
  compile    the shipped model compiled for this GPU, which the next two run
  memcheck   a short generation under compute-sanitizer: no access outside of buffers
  racecheck  the same: no races in shared memory
  bench      every kernel of the release's steps of 1, 16 and 512 tokens, and residual boundaries of 64 and 4096,
             against what this GPU copies and multiplies at most, beside PyTorch eager and compiled

Every step has a time limit and the next one starts whatever became of it; all together take ten minutes at most, and
what `bench` has not come to by then is left out. The exit status is 1 when a step failed.

examples:
  python tools/gpu_check.py --json gpu.json
  python tools/gpu_check.py --steps facts,kernels,engines
  python tools/gpu_check.py --steps facts,bench --json bench.json

v41c need not be installed. This needs Python 3.11 or later and
  {packages}
Compiled kernels are kept in ~/.cache/v41c ($XDG_CACHE_HOME), so that a second run has more time to measure.
"""
#: what is run under the sanitizer: an engine's folder is its argument
GENERATION = """
import sys
from v41c.runtime.artifact import load
from v41c.runtime.session import Session
session = Session(load(sys.argv[1]), drafting=True, poison=True)
session.prefill(range(5, 45))
for token in (7, 8, 9):
    session.decode(token)
session.draft({0: 10})
print("generated")
"""
COMPILATION = """
import sys
from v41c.compile import CompileOptions, compile
from v41c.frontend.presets import TRAINED_CHECKPOINT
report = compile(TRAINED_CHECKPOINT, sys.argv[1], CompileOptions(target="cuda", max_context=512))
print(f"{report.kernels} kernels for {report.target}")
"""


@dataclass(frozen=True)
class Outcome:
    """What became of a step: "passed", "failed" or "skipped", its seconds, and what it says of itself in one line."""

    step: str
    status: str
    seconds: float
    detail: str
    output: str = ""


@dataclass
class Check:
    """A run of some steps in a folder of its own."""

    folder: Path
    deadline: float
    outcomes: list[Outcome] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    bench: list[dict[str, Any]] = field(default_factory=list)

    def run(self, step: str) -> Outcome:
        """Run a step; whatever happens is an outcome."""
        left = self.deadline - time.monotonic()
        if left < 1:
            return Outcome(step, "skipped", 0.0, "no time is left")
        began = time.monotonic()
        try:
            outcome = STEPS[step](self, left)
        except Exception as error:  # the next steps are worth running
            outcome = Outcome(step, "failed", 0.0, f"{type(error).__name__}: {error}")
        return replace(outcome, seconds=time.monotonic() - began)


def facts(check: Check, left: float) -> Outcome:
    """What the GPU and its software are."""
    import torch

    found = torch.cuda.get_device_properties(0)
    query = "name,driver_version,memory.total,clocks.max.sm,power.limit"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    has_tool = shutil.which(command[0]) is not None
    text = subprocess.run(command, capture_output=True, text=True, timeout=left).stdout if has_tool else ""
    check.facts = {
        "gpu": found.name,
        "capability": f"sm_{found.major}{found.minor}",
        "multiprocessors": found.multi_processor_count,
        "memory_bytes": found.total_memory,
        "l2_bytes": found.L2_cache_size,
        "nvidia_smi": dict(zip(query.split(","), (part.strip() for part in text.split(",")), strict=False)),
        "python": sys.version.split()[0],
        "packages": {name: version(name) for name in PACKAGES.values()} | {"cuda": torch.version.cuda},
    }
    packages = check.facts["packages"]
    detail = f"{found.name}, {check.facts['capability']}, torch {packages['torch']}, triton {packages['triton']}"
    return Outcome("facts", "passed", 0.0, detail)


def kernels(check: Check, left: float) -> Outcome:
    """Every operation's kernel on its examples."""
    return tested("kernels", ["tests/device/test_every_kernel.py"], min(left, 150))


def engines(check: Check, left: float) -> Outcome:
    """Golden engines, several at a time where pytest-xdist is there: most of it is work of the CPU."""
    several = ["-n", "6"] if _found("xdist") else []
    return tested("engines", ["tests/device/test_engine.py", *several], min(left, 200))


def tested(step: str, arguments: Sequence[str], limit: float) -> Outcome:
    """A run of pytest; warnings of other versions of packages are none of its business, nor is a missing plugin."""
    options = ["-o", "addopts=--import-mode=importlib", "-q", "-W", "default", "-p", "no:cacheprovider", "-rfE"]
    command = [sys.executable, "-m", "pytest", *arguments, *options]
    outcome = finished(step, run_limited(command, limit), last_line)
    none = outcome.status == "passed" and " passed" not in outcome.detail
    return replace(outcome, status="failed") if none else outcome


def compilation(check: Check, left: float) -> Outcome:
    """The engine that the sanitizer runs."""
    command = [sys.executable, "-c", COMPILATION, str(check.folder / "engine")]
    return finished("compile", run_limited(command, min(left, 50)), last_line)


def memcheck(check: Check, left: float) -> Outcome:
    """No access outside of buffers."""
    return sanitized("memcheck", check, min(left, 50))


def racecheck(check: Check, left: float) -> Outcome:
    """No races in shared memory."""
    return sanitized("racecheck", check, min(left, 40))


def sanitized(tool: str, check: Check, limit: float) -> Outcome:
    """The generation under a tool of compute-sanitizer, where there is one and an engine."""
    found = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if found is None:
        return Outcome(tool, "skipped", 0.0, "compute-sanitizer is neither on the PATH nor in /usr/local/cuda/bin")
    if not (check.folder / "engine").is_dir():
        return Outcome(tool, "skipped", 0.0, "there is no engine: the step compile makes it")
    command = [found, "--tool", tool, "--error-exitcode", "9", "--print-limit", "20"]
    command += [sys.executable, "-c", GENERATION, str(check.folder / "engine")]
    return finished(tool, run_limited(command, limit), last_line)


def bench(check: Check, left: float) -> Outcome:
    """Lines are read from a file, so that a run that is ended has said what it knew."""
    from tools.gpu_text import bench_lines

    path = check.folder / "bench.jsonl"
    done = run_limited([sys.executable, "-m", "tools.gpu_bench", str(path)], left)
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    check.bench = bench_lines(text)
    measured = [line for line in check.bench if "seconds" in line]
    errors = [line for line in check.bench if "error" in line]
    detail = f"{len(measured)} kernels measured, {len(errors)} not or wrong" + (
        ", ended by the time limit" if done.late else ""
    )
    ok = bool(measured) and not errors and (done.late or done.status == 0)
    return Outcome("bench", "passed" if ok else "failed", 0.0, detail, done.output[-4000:])


@dataclass(frozen=True)
class Done:
    """How a command ended; `late` when its time limit ended it."""

    status: int
    output: str
    late: bool


def run_limited(command: Sequence[str], limit: float) -> Done:
    """Run a command from the repository's root, standard output and error together, with all it starts, for so long."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status, late = process.wait(limit), False
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            status, late = process.wait(), True
        file.seek(0)
        return Done(status, file.read(), late)


def finished(step: str, done: Done, describe: Callable[[str], str]) -> Outcome:
    """The outcome of a command."""
    passed = done.status == 0 and not done.late
    late = "ended by its time limit: " if done.late else ""
    output = "" if passed else done.output[-8000:]
    return Outcome(step, "passed" if passed else "failed", 0.0, late + describe(done.output), output)


def last_line(output: str) -> str:
    """What a program said last."""
    lines = [line for line in output.splitlines() if line.strip()]
    return re.sub(r"^=+ | =+$", "", lines[-1])[:160] if lines else "it said nothing"


STEPS: Mapping[str, Callable[[Check, float], Outcome]] = {
    "facts": facts,
    "kernels": kernels,
    "engines": engines,
    "compile": compilation,
    "memcheck": memcheck,
    "racecheck": racecheck,
    "bench": bench,
}


def why_not() -> str | None:
    """In one line what is missing here for anything to run, None when nothing is."""
    missing = [package for module, package in PACKAGES.items() if not _found(module)]
    if missing:
        return f"Python packages: expected {', '.join(missing)}, found none: pip install {' '.join(missing)}"
    from v41c.errors import DeviceError
    from v41c.runtime.cuda_driver import CudaDriver
    from v41c.targets.cuda import TARGETS

    try:
        capability = CudaDriver().capability
    except DeviceError as error:
        return str(error)
    if capability not in [target.capability for target in TARGETS]:
        names = ", ".join(target.name for target in TARGETS)
        return f"CUDA: expected a GPU of {names}, found sm_{capability}"
    import torch

    return None if torch.cuda.is_available() else f"PyTorch {torch.__version__}: expected one for CUDA"


def _found(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the steps asked for; the exit status."""
    parser = argparse.ArgumentParser(
        prog="gpu_check.py",
        description="Checks and measures v41c on this machine's GPU.",
        epilog=HELP.format(packages=", ".join(PACKAGES.values())),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--steps", default=",".join(STEPS), help="the steps to run, separated by commas (all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was found, outputs included")
    options = parser.parse_args(arguments)
    steps = options.steps.split(",")
    unknown = [step for step in steps if step not in STEPS]
    if unknown:
        parser.error(f"--steps: expected some of {', '.join(STEPS)}, got {unknown[0]!r}")
    sys.path.insert(0, str(ROOT))
    reason = why_not()
    if reason is not None:
        print(f"gpu_check: {reason}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="v41c-") as folder:
        check = Check(Path(folder), time.monotonic() + SECONDS)
        for step in STEPS:
            if step in steps:
                run_step(check, step, options.json)
    from tools.gpu_text import report_text

    print(report_text(check))
    return int(any(outcome.status == "failed" for outcome in check.outcomes))


def run_step(check: Check, step: str, file: Path | None) -> None:
    """Run a step, say what became of it, and write what is known by now."""
    print(f"{step} ...", flush=True)
    outcome = check.run(step)
    check.outcomes.append(outcome)
    print(f"{step}: {outcome.status} in {outcome.seconds:.0f} s: {outcome.detail}", flush=True)
    if outcome.output:
        print(outcome.output, flush=True)
    if file is not None:
        found = {"facts": check.facts, "steps": [asdict(one) for one in check.outcomes], "bench": check.bench}
        file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
