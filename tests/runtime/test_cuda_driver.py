"""The CUDA driver through the real bindings, on a library that stands in for NVIDIA's: what it is asked, and errors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_SOURCE = Path(__file__).with_name("fake_cuda.c")
_PREAMBLE = """
import numpy as np
from v41c.errors import DeviceError
from v41c.runtime.cuda_driver import CudaDriver

def parameters(*values):
    kept = np.array(values, np.uint64)
    return kept, kept.ctypes.data + 8 * np.arange(len(values), dtype=np.uint64)

try:
    driver = CudaDriver()
except DeviceError as error:
    raise SystemExit(f"DeviceError: {error}")
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the stand-in for the driver's library."""
    folder = tmp_path_factory.mktemp("cuda")
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror"]
    subprocess.run(["gcc", *flags, str(_SOURCE), "-o", str(folder / "libcuda.so.1")], check=True)
    return folder


def run(script: str, library: Path, notes: Path, devices: int = 1) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[2]
    settings = {
        "LD_LIBRARY_PATH": str(library),
        "FAKE_CUDA_NOTES": str(notes),
        "FAKE_CUDA_DEVICES": str(devices),
        "PYTHONPATH": str(root),
    }
    command = [sys.executable, "-c", _PREAMBLE + script]
    return subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, check=False)


def test_memory(library: Path, tmp_path: Path) -> None:
    script = """
block = driver.allocate(4096, "a block")
driver.fill(block, 7, 4096)
driver.upload(block + 64, np.arange(16, dtype=np.int32))
driver.copy(block + 1024, block + 64, 64)
driver.synchronize()
found = np.empty(16, np.int32)
driver.download(found, block + 1024)
print(driver.capability, driver.free_bytes, found.sum())
driver.download(found, block)
print(hex(found[0]))
print(driver.hardware.replace(" ", "_"))
print(driver.register(found) == found.ctypes.data)
"""
    done = run(script, library, tmp_path / "notes")
    assert done.stdout.split() == ["90", str(1 << 30), "120", "0x7070707", "Stand-in_0,_driver_13000", "True"], (
        done.stderr
    )
    assert (tmp_path / "notes").read_text() == "register 64 10\n"  # mapped for the device, which only reads


def test_launches_and_recordings(library: Path, tmp_path: Path) -> None:
    script = """
kernel = driver.kernel(b"\\x7fELF", "some_kernel", 100_000)
kept, addresses = parameters(0x1000, 0x2000, 17, 0, 0)
driver.launch(kernel, (3, 2, 1), 128, 100_000, addresses.ctypes.data)
driver.kernel(b"\\x7fELF", "small", 48 << 10)
driver.begin_recording()
driver.launch(kernel, (1, 1, 4), 256, 0, addresses.ctypes.data)
recording = driver.end_recording()
driver.replay(recording)
driver.replay(recording)
"""
    done = run(script, library, tmp_path / "notes")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "notes").read_text().splitlines() == [
        "attribute some_kernel 8 100000",  # more dynamic shared memory than a kernel may take unasked
        "launch some_kernel on 0x20 3 2 1 128 1 1 100000 4096 8192 17 0 0",
        "begin 1",
        "launch some_kernel on 0x20 1 1 4 256 1 1 0 4096 8192 17 0 0",
        "end",
        "replay 0x50",
        "replay 0x50",
    ]


def test_launches_aside_are_put_in_order_by_events(library: Path, tmp_path: Path) -> None:
    script = """
kernel = driver.kernel(b"\\x7fELF", "some_kernel", 0)
kept, addresses = parameters(0x1000, 0x2000, 17, 0, 0)
begun, done = driver.event(), driver.event()
driver.begin_recording()
driver.mark(begun, aside=False)
driver.wait(begun, aside=True)
driver.launch(kernel, (1, 1, 1), 64, 0, addresses.ctypes.data, aside=True)
driver.mark(done, aside=True)
driver.wait(done, aside=False)
driver.end_recording()
"""
    done = run(script, library, tmp_path / "notes")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "notes").read_text().splitlines() == [
        "begin 1",
        "mark 0x60 on 0x20",
        "wait 0x60 on 0x21",
        "launch some_kernel on 0x21 1 1 1 64 1 1 0 4096 8192 17 0 0",
        "mark 0x61 on 0x21",
        "wait 0x61 on 0x20",
        "end",
    ]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            "driver.allocate(2 << 30, 'activations')",
            "activations: 2147483648 bytes cannot be had on the GPU: CUDA: cuMem",
        ),
        ("driver.kernel(b'no cubin', 'some_kernel', 0)", "CUDA: cuLibraryLoadData: CUDA_ERROR_INVALID_VALUE"),
        ("driver.kernel(b'\\x7fELF', 'absent', 0)", "CUDA: cuLibraryGetKernel: CUDA_ERROR_NOT_FOUND"),
    ],
)
def test_refusals_are_one_line(call: str, message: str, library: Path, tmp_path: Path) -> None:
    done = run(f"try:\n    {call}\nexcept DeviceError as error:\n    print(error)", library, tmp_path / "notes")
    assert done.stdout.startswith(message), done.stderr
    assert done.stdout.count("\n") == 1


def test_no_gpu(library: Path, tmp_path: Path) -> None:
    assert run("", library, tmp_path / "notes", devices=0).stderr == "DeviceError: CUDA: expected a GPU, found none\n"


def test_no_driver(tmp_path: Path) -> None:
    done = run("", tmp_path, tmp_path / "notes")
    assert done.stderr.startswith("DeviceError: CUDA: expected a GPU and its driver, found none")
    assert done.stderr.count("\n") == 1
