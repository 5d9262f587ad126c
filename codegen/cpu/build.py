"""Kernels to one shared library that needs nothing but libc: TIR to object files by TVM, linked with `runtime.c`."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import tvm
from tvm import tirx

from v41c.codegen.kernel import CpuKernel
from v41c.codegen.store import keep, sources_key
from v41c.codegen.workers import in_parallel
from v41c.errors import UnsupportedError
from v41c.targets.target import CpuTarget

_RUNTIME = Path(__file__).with_name("runtime.c")
_EXPORTS = "{ global: __tvm_ffi_*; v41c_*; local: *; };\n"


def build_library(
    kernels: Sequence[CpuKernel], target: CpuTarget, path: Path, cache_folder: Path | None = None
) -> None:
    """Write the kernels as a shared library; equal kernels and tools give equal bytes.

    Equal kernels are compiled once, ever: `cache_folder` keeps their object files, if there is one. It is for kernels
    of `kernel_for`, whose symbols say all that their code does not.

    Kernel `k` is exported as `__tvm_ffi_<k.symbol>`, beside `v41c_run`, `v41c_copy_rows`, `v41c_set_threads` and
    `v41c_last_error`.
    Kernels of one symbol must be the same kernel and are built once.
    """
    unique = {kernel.symbol: kernel for kernel in kernels}
    compiler = _compiler()

    def write_object(path: Path) -> None:
        if path.stem == _RUNTIME.stem:
            path.write_bytes(_runtime_object(compiler, target.mcpu))
            return
        kept = None if cache_folder is None else cache_folder / f"{path.stem}-{_toolchain_key(target)}.o"
        if kept is not None and kept.is_file():
            shutil.copyfile(kept, path)
            return
        compile_object(unique[path.stem], target, path)
        if kept is not None:
            with contextlib.suppress(OSError):  # a full disk costs time, not the engine
                keep(kept, path.read_bytes())

    with tempfile.TemporaryDirectory(prefix="v41c-") as folder:
        files = [Path(folder, f"{name}.o") for name in (_RUNTIME.stem, *sorted(unique))]
        list(in_parallel(write_object, files))
        exports = Path(folder, "exports.map")
        exports.write_text(_EXPORTS)
        listing = Path(folder, "objects.txt")
        listing.write_text("".join(f'"{file.name}"\n' for file in files))
        command = [compiler, "-shared", "-pthread", "-s", "-Wl,--build-id=none", "-Wl,--gc-sections", "-Wl,--as-needed"]
        _run([*command, f"-Wl,--version-script={exports.name}", f"@{listing.name}", "-o", str(path.resolve())], folder)


@cache
def _toolchain_key(target: CpuTarget) -> str:
    """What an object file depends on besides its symbol: the target, TVM, and the sources that write kernels."""
    text = f"{target} {tvm.__version__} {sources_key('v41c.codegen', 'v41c.ir', 'v41c.targets')}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def compile_object(kernel: CpuKernel, target: CpuTarget, path: Path) -> None:
    """Compile one kernel to an object file.

    Only the passes that TIR written by this package needs: its buffers are flat and its vectors explicit. The default
    pipeline's simplifications cost time, and FlattenBuffer without them hides vector indices from the code generator,
    which then moves lane by lane.
    """
    # level 3 takes a third more time and makes no kernel faster: vectors and unrolling are explicit here
    host = tvm.target.Target({"kind": "llvm", "mcpu": target.mcpu, "opt-level": 2})
    passes = [
        tirx.transform.BindTarget(host.with_host(host)),
        tirx.transform.MakePackedAPI(),
        tirx.transform.LowerTVMBuiltin(),
        tirx.transform.LowerIntrin(),
    ]
    module: Any = tvm.IRModule({kernel.symbol: kernel.function()})
    for lower in passes:
        module = lower(module)
    tvm.get_global_func("target.build.llvm")(module, host).write_to_file(str(path), "o")


@cache
def _runtime_object(compiler: str, mcpu: str) -> bytes:
    """`runtime.c` as an object file, made once per process."""
    flags = ["-O2", "-std=gnu11", "-fPIC", "-fvisibility=hidden", f"-march={mcpu}", "-pthread", "-Wall", "-Wextra"]
    with tempfile.TemporaryDirectory(prefix="v41c-") as folder:
        path = Path(folder, "runtime.o")
        _run([compiler, *flags, "-c", _RUNTIME.name, "-o", str(path)], str(_RUNTIME.parent))
        return path.read_bytes()


def _compiler() -> str:
    for name in (os.environ.get("CC", ""), "gcc", "cc", "clang"):
        found = shutil.which(name) if name else None
        if found:
            return found
    raise UnsupportedError("kernel library: expected a C compiler (gcc, cc or clang) on PATH or in CC; install gcc")


def _run(command: list[str], folder: str) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = " ".join(done.stderr.split())[:300]
        raise UnsupportedError(f"kernel library: {command[0]} failed with status {done.returncode}: {reason}")
