"""How an engine starts: without PyTorch and compilers, and soon."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from v41c.frontend.presets import TRAINED_CHECKPOINT

ROOT = Path(__file__).parents[1]
COMPILERS = ("torch", "triton", "tvm", "tvm_ffi", "onnx", "rich")
EngineOf = Callable[[Path, str], Path]
_REPORT = "import sys; from v41c.cli import main; code = main(sys.argv[1:]); print(sys.modules.keys(), file=sys.stderr)"


def modules_of(*arguments: str) -> set[str]:
    """Modules that a command has imported when it is done."""
    done = subprocess.run([sys.executable, "-c", _REPORT, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    listed = done.stderr.splitlines()[-1].removeprefix("dict_keys([").removesuffix("])")
    return {name.strip("' ") for name in listed.split(",")}


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "--prompt", "And it came to pass,", "--max-new-tokens", "2"),
        ("run", "--tokens", "0,5,7", "--max-new-tokens", "2", "--json"),
        ("inspect",),
        ("inspect", "--pass", "trace", "--graph", "model"),
    ],
    ids=" ".join,
)
def test_no_compiler_is_imported(engine_of: EngineOf, arguments: tuple[str, ...]) -> None:
    verb, *rest = arguments
    modules = modules_of(verb, str(engine_of(TRAINED_CHECKPOINT, "release")), *rest)
    assert "v41c.runtime.artifact" in modules
    assert {name for name in modules if name.partition(".")[0] in COMPILERS} == set()
    print(f"v41c {' '.join(arguments)}: {len(modules)} modules")


def test_first_token_within_a_second_and_a_half(engine_of: EngineOf) -> None:
    command = [sys.executable, "-m", "v41c", "run", str(engine_of(TRAINED_CHECKPOINT, "release"))]
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        with subprocess.Popen(
            [*command, "--prompt", "And it came to pass,", "--max-new-tokens", "1"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        ) as process:
            assert process.stdout is not None
            assert process.stdout.read(1)
            seconds.append(time.perf_counter() - began)
    print(f"first token after {min(seconds):.2f} s")
    assert min(seconds) <= 1.5


def test_the_ir_needs_no_torch() -> None:
    code = (
        "import importlib, pkgutil, sys; sys.modules['torch'] = None; import v41c.ir, v41c.ir.ops\n"
        "for package in (v41c.ir, v41c.ir.ops):\n"
        "    for found in pkgutil.iter_modules(package.__path__, package.__name__ + '.'):\n"
        "        found.name == 'v41c.ir.torch_types' or importlib.import_module(found.name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
