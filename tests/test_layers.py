"""Who may import whom, file by file: imports point one way, and an engine runs where no compiler is installed."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ANYTHING = ("v41c",)
#: what the files of a folder may import of ours besides their own folder
ALLOWED = {
    "ir": ("v41c.errors",),
    "frontend": ("v41c.errors", "v41c.ir"),
    "targets": ("v41c.errors", "v41c.ir"),
    "passes": ("v41c.errors", "v41c.ir", "v41c.targets"),
    "codegen": ("v41c.errors", "v41c.ir", "v41c.targets", "v41c.manifest"),
    "runtime": ("v41c.errors", "v41c.manifest"),
    "v41c": ANYTHING,
}
#: what needs no PyTorch and no compiler, wherever the import stands
FREE_OF_COMPILERS = ("runtime",)
COMPILERS = ("torch", "triton", "tvm", "tvm_ffi", "onnx")
FILES = [
    (folder, path)
    for folder in ALLOWED
    for path in sorted((ROOT / folder).rglob("*.py"))
    if path.relative_to(ROOT / folder).parts[0] not in ALLOWED  # v41c/ has links to the other folders
]


def names(path: Path) -> Iterator[str]:
    """Every name that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def within(name: str, modules: tuple[str, ...]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


@pytest.mark.parametrize(("folder", "path"), FILES, ids=[str(path.relative_to(ROOT)) for _, path in FILES])
def test_imports_point_one_way(folder: str, path: Path) -> None:
    for name in names(path):
        top = name.partition(".")[0]
        assert top == "v41c" or top not in ALLOWED, f"import v41c.{top}: a second name makes second classes"
        assert top != "tests", f"{name} is not part of the package"
        if top == "v41c":
            assert within(name, (*ALLOWED[folder], f"v41c.{folder}")), f"{folder} must not import {name}"
        if folder in FREE_OF_COMPILERS:
            assert top not in COMPILERS, f"{folder} must not import {name}"


def test_every_folder_is_read() -> None:
    assert {folder for folder, _ in FILES} == set(ALLOWED)
    own = [path for part in ("v41c", "v41c/serve") for path in (ROOT / part).glob("*.py")]
    assert sum(folder == "v41c" for folder, _ in FILES) == len(own)


@pytest.mark.parametrize("folder", ["passes", "codegen"])
def test_nobody_asks_a_target_for_its_name(folder: str) -> None:
    asked = re.compile(r"target\.name\s*(==|!=|\bin\b|\.startswith)|match\s+\S*target\.name")
    for path in (ROOT / folder).rglob("*.py"):
        found = asked.search(path.read_text(encoding="utf-8"))
        assert found is None, f"{path.relative_to(ROOT)}: ask for a capability, not for {found and found[0]}"
