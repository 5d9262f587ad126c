"""Triton functions to cubins: by processes that import Triton for compilation, and a cache of what they made."""

from __future__ import annotations

import hashlib
import json
import os
import queue
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from v41c.codegen.cuda.kernel import CudaKernel, Function
from v41c.codegen.store import keep, sources_key
from v41c.codegen.workers import in_parallel, processors
from v41c.errors import UnsupportedError
from v41c.targets.cuda import CudaTarget


class Cubin(msgspec.Struct, frozen=True):
    """What a compiled function needs at launch, and what its machine code is made of."""

    function: str
    warps: int
    shared_bytes: int
    registers: int
    spill_bytes: int
    instructions: dict[str, int]


def build_cubins(
    kernels: Iterable[CudaKernel],
    target: CudaTarget,
    folder: Path,
    cache_folder: Path,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Cubin]:
    """Write `<key>.cubin` for every function of the kernels into `folder`; what each needs, by key.

    Equal functions are compiled once, ever: `cache_folder` keeps them by content. UnsupportedError names a function
    that does not compile, or needs more than the target has.
    """
    functions = functions_of(kernels)
    entries = {key: _Entry(functions[key], target, cache_folder) for key in sorted(functions)}
    made: dict[str, Cubin] = {}
    missing = []
    for key, entry in entries.items():
        found = entry.copy_to(folder / f"{key}.cubin")
        if found is None:
            missing.append(key)
        else:
            made[key] = found
    for number, key in enumerate(_compile([entries[key] for key in missing])):
        progress(f"compiling kernel {number + 1} of {len(missing)}")
        found = entries[key].copy_to(folder / f"{key}.cubin")
        if found is None:
            raise UnsupportedError(f"{entries[key].path}: expected the kernel just compiled, found it gone")
        made[key] = found
    for key, cubin in made.items():
        _check(functions[key], cubin, target)
    return dict(sorted(made.items()))


def functions_of(kernels: Iterable[CudaKernel]) -> dict[str, Function]:
    """The functions that kernels launch, by key."""
    return {launch.function.key(): launch.function for kernel in kernels for launch in kernel.launches}


@dataclass(frozen=True)
class _Entry:
    """The place of one function's cubin in the cache: the file, and beside it what it needs."""

    function: Function
    target: CudaTarget
    folder: Path

    @property
    def path(self) -> Path:
        """Named by everything that the machine code depends on."""
        text = json.dumps([asdict(self.function), self.target.capability, _compiler_key()], sort_keys=True)
        return self.folder / f"{hashlib.sha256(text.encode()).hexdigest()}.cubin"

    def copy_to(self, path: Path) -> Cubin | None:
        """Copy the cubin; what it needs, or None when the cache has none."""
        try:
            head, newline, code = self.path.read_bytes().partition(b"\n")
            cubin = msgspec.json.decode(head, type=Cubin)
        except (OSError, msgspec.DecodeError):
            return None
        if not newline:
            return None
        path.write_bytes(code)
        return cubin

    def store(self, cubin: Cubin, code: bytes) -> None:
        """Keep a cubin: complete or not at all, whoever else writes the same."""
        keep(self.path, msgspec.json.encode(cubin) + b"\n" + code)


@cache
def _compiler_key() -> str:
    """What stands for the compiler: Triton's version and the sources of all kernels, which call each other."""
    return f"{version('triton')} {sources_key('v41c.codegen.cuda')}"


def _compile(entries: list[_Entry]) -> Iterable[str]:
    """Compile into the cache, as many at a time as there are processors; keys in the order given."""
    if not entries:
        return
    with ExitStack() as stack:
        idle: queue.SimpleQueue[_Compiler] = queue.SimpleQueue()
        for _ in range(min(len(entries), processors())):
            idle.put(stack.enter_context(_Compiler()))

        def compile_one(entry: _Entry) -> str:
            compiler = idle.get()
            try:
                entry.store(*compiler.compile(entry.function, entry.target))
            finally:
                idle.put(compiler)
            return entry.function.key()

        yield from in_parallel(compile_one, entries)


class _Compiler:
    """A running `v41c.codegen.cuda.compiler`."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="v41c-")
        # line tables would hold this machine's paths; Triton's own cache would be a second one
        settings = {"TRITON_DISABLE_LINE_INFO": "1", "TRITON_CACHE_DIR": self._folder.name, "TRITON_INTERPRET": "0"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "v41c.codegen.cuda.compiler"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **settings},
        )

    def __enter__(self) -> _Compiler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()
        self._folder.cleanup()

    def compile(self, function: Function, target: CudaTarget) -> tuple[Cubin, bytes]:
        """The cubin of a function, and what it needs."""
        file = Path(self._folder.name, f"{function.key()}.cubin")
        job = {
            "module": function.module,
            "function": function.name,
            "parameters": function.parameters,
            "constants": function.constants,
            "warps": function.warps,
            "stages": function.stages,
            "capability": target.capability,
            "file": str(file),
        }
        answer = self._ask(job)
        if "error" in answer:
            raise UnsupportedError(f"{function.name} on {target.name}: does not compile: {answer['error']}")
        return msgspec.convert(answer, Cubin), file.read_bytes()

    def _ask(self, job: dict[str, Any]) -> dict[str, Any]:
        line = ""
        if self._process.stdin is not None and self._process.stdout is not None:
            try:
                self._process.stdin.write(json.dumps(job) + "\n")
                self._process.stdin.flush()
                line = self._process.stdout.readline()
            except OSError:
                line = ""
        if not line:
            return {"error": f"the compiler ended with status {self._process.wait()}"}
        answer: dict[str, Any] = json.loads(line)
        return answer


def _check(function: Function, cubin: Cubin, target: CudaTarget) -> None:
    if cubin.shared_bytes > target.shared_bytes_per_block:
        raise UnsupportedError(
            f"{function.name} on {target.name}: shared memory: expected at most {target.shared_bytes_per_block} bytes "
            f"a block, got {cubin.shared_bytes}"
        )
