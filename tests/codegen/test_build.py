"""Kernel libraries: equal bytes for equal kernels, nothing needed but libc, threads, errors."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.codegen.harness import Array, Library, aligned, poisoned
from v41c.codegen.cpu import build, has_kernel, kernel_for, tir
from v41c.codegen.cpu.build import build_library
from v41c.codegen.kernel import CpuKernel, kernel_symbol
from v41c.errors import UnsupportedError
from v41c.ir.op import Op
from v41c.ir.ops.add import Add
from v41c.ir.types import TensorType, f32
from v41c.targets import x86_64


def scaling(symbol: str, factor: float) -> CpuKernel:
    """out[i, :] = factor · x[i, :] for rows of 16, in parallel."""
    with tir.function(symbol, {"x": "float32", "out": "float32"}, ("T",)) as made:
        x, out = made.buffers.values()
        with tir.parallel(made.scalars["T"]) as i:
            tir.put(out, i * 16, tir.load(x, i * 16) * tir.const(factor, 16))
    return CpuKernel(symbol, lambda: made.primfunc, ("T",))


KERNELS = (scaling("thrice", 3.0), scaling("twice", 2.0))


@pytest.fixture(scope="module")
def library() -> Library:
    """Both kernels for this machine."""
    return Library(KERNELS, x86_64.host())


def numbers(rows: int) -> Array:
    return aligned(np.random.default_rng(0).standard_normal((rows, 16)).astype(np.float32))


def test_a_kept_kernel_is_not_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [tmp_path / f"{number}.so" for number in (0, 1)]
    build_library(KERNELS, x86_64.host(), paths[0], tmp_path / "cache")
    monkeypatch.setattr(build, "compile_object", None)
    build_library(KERNELS, x86_64.host(), paths[1], tmp_path / "cache")
    assert paths[0].read_bytes() == paths[1].read_bytes()
    with pytest.raises(TypeError, match="not callable"):
        build_library(KERNELS, replace(x86_64.host(), l2_bytes=7), paths[1], tmp_path / "cache")


def test_equal_kernels_give_equal_bytes(tmp_path: Path) -> None:
    for target in x86_64.TARGETS:
        paths = [tmp_path / name for name in ("a.so", "b.so")]
        build_library(KERNELS, target, paths[0])
        build_library((*KERNELS[::-1], scaling("twice", 2.0)), target, paths[1])
        assert paths[0].read_bytes() == paths[1].read_bytes()
        assert str(tmp_path).encode() not in paths[0].read_bytes()


def test_library_runs_without_the_compiler(tmp_path: Path) -> None:
    build_library(KERNELS, x86_64.host(), tmp_path / "kernels.so")
    script = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1], mode=2)  # RTLD_NOW: every symbol is found, or this fails
values = (ctypes.c_float * 32)(*range(32))
argument = ctypes.c_int64 * 2
arguments = (argument * 3)(argument(4, ctypes.addressof(values)), argument(4, ctypes.addressof(values)), argument(1, 2))
assert library.__tvm_ffi_twice(None, arguments, 3, (ctypes.c_int64 * 2)()) == 0
assert list(values) == [2.0 * i for i in range(32)]
assert not {"torch", "tvm", "tvm_ffi"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "kernels.so")], check=True)


def test_only_kernels_and_entry_points_are_visible(library: Library) -> None:
    for name in ("v41c_run", "v41c_copy_rows", "v41c_set_threads", "v41c_last_error", "__tvm_ffi_twice"):
        assert hasattr(library.handle, name)
    for name in ("__TVMBackendParallelLaunch", "TVMFFIErrorSetRaisedFromCStrParts", "__tvm_ffi_main"):
        # a name that another library of the process exports would be found through this one's handle, too
        assert not hasattr(library.handle, name) or _address(library.handle, name) not in _range(library)


def _address(handle: ctypes.CDLL, name: str) -> int:
    return ctypes.cast(getattr(handle, name), ctypes.c_void_p).value or 0


def _range(library: Library) -> range:
    base = _address(library.handle, "v41c_run")
    return range(base - (1 << 16), base + (1 << 16))


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_any_number_of_threads(threads: int, library: Library) -> None:
    assert library.handle.v41c_set_threads(threads) == threads
    for rows in (0, 1, 2, 7, 1000):
        x, out = numbers(rows), poisoned((rows, 16), "f32")
        for _ in range(20):
            library.call(KERNELS[0], [x, out], {"T": rows})
            assert np.array_equal(out, 3 * x)
    assert library.handle.v41c_set_threads(0) >= 1


def test_calls_from_several_threads_take_turns(library: Library) -> None:
    library.handle.v41c_set_threads(2)
    x, failures = numbers(500), []

    def work(kernel: CpuKernel, factor: float) -> None:
        out = poisoned((500, 16), "f32")
        for _ in range(200):
            library.call(kernel, [x, out], {"T": 500})
            if not np.array_equal(out, factor * x):
                failures.append(factor)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(KERNELS, (3.0, 2.0), strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_parallel_loops_work_in_a_forked_process(tmp_path: Path) -> None:
    build_library(KERNELS, x86_64.host(), tmp_path / "kernels.so")
    script = """
import ctypes, os, sys
library = ctypes.CDLL(sys.argv[1])
values = (ctypes.c_float * 1600)(*[1.0] * 1600)
argument = ctypes.c_int64 * 2
pointer = argument(4, ctypes.addressof(values))
arguments = (argument * 3)(pointer, pointer, argument(1, 100))
library.v41c_set_threads(2)
run = lambda: library.__tvm_ffi_twice(None, arguments, 3, (ctypes.c_int64 * 2)())
assert run() == 0
child = os.fork()
if child == 0:
    os._exit(0 if run() == 0 and set(values) == {4.0} else 1)
assert os.waitpid(child, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", script, str(tmp_path / "kernels.so")], check=True)


def test_scratch_memory_is_aligned_and_private(library: Library) -> None:
    # 2 KiB per iteration: each must read back what it wrote, whichever thread runs it
    with tir.function("scratch", {"out": "float32"}, ("T",)) as made, tir.parallel(made.scalars["T"]) as i:
        memory = tir.scratch(512)
        with tir.loop(32) as j:
            tir.put(memory, j * 16, tir.splat(tir.cast(i * 32 + j, "float32"), 16))
        with tir.loop(32) as j:
            tir.put(made.buffers["out"], (i * 32 + j) * 16, tir.load(memory, j * 16))
    kernel = CpuKernel("scratch", lambda: made.primfunc, ("T",))
    out = poisoned((400, 32, 16), "f32")
    Library([kernel], x86_64.host()).call(kernel, [out], {"T": 400})
    assert np.array_equal(out[..., 0].ravel(), np.arange(400 * 32))
    assert (out == out[..., :1]).all()


def test_wrong_arguments_are_reported_not_run(library: Library) -> None:
    x = numbers(3)
    with pytest.raises(RuntimeError, match="twice: TypeError: Expected 3 arguments"):
        library.call(KERNELS[1], [x], {"T": 3})


def test_a_missing_compiler_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(UnsupportedError, match=r"expected a C compiler .* on PATH or in CC; install gcc"):
        build_library(KERNELS, x86_64.host(), tmp_path / "kernels.so")


def test_a_failing_compiler_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "cc"
    fake.write_text("#!/bin/sh\necho no\\\\nspace left >&2\nexit 3\n")
    fake.chmod(0o755)
    monkeypatch.setenv("CC", str(fake))
    with pytest.raises(UnsupportedError, match=r"cc failed with status 3: no space left$"):
        build.build_library(KERNELS, x86_64.host(), tmp_path / "kernels.so")


def test_an_operation_without_a_kernel_is_named() -> None:
    class Unheard(Op):
        @classmethod
        def name(cls) -> str:
            return "unheard"

    assert has_kernel("linear")
    with pytest.raises(UnsupportedError, match=r"unheard on cpu:x86-64-v.: no kernel; expected codegen/cpu/unheard.py"):
        kernel_for(Unheard(), (), (), x86_64.TARGETS[0], {})


def test_symbols_tell_kernels_apart() -> None:
    def symbol(width: int, bounds: dict[str, int], out: str = "f32") -> str:
        kinds: tuple[TensorType, ...] = (f32("T", width), f32("T", width))
        return kernel_symbol(Add(out), kinds, kinds[:1], bounds)

    assert symbol(8, {"T": 1}).startswith("add_T1_")
    assert symbol(8, {"T": 1}) == symbol(8, {"T": 1, "C2": 9})
    assert len({symbol(8, {"T": 1}), symbol(9, {"T": 1}), symbol(8, {"T": 2}), symbol(8, {"T": 1}, "bf16")}) == 4
