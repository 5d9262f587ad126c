"""v41c: a compiler-driven graph pipeline for models of the DeepSeek-V4.1-Flash architecture."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

__version__ = "0.1.0"
_FOLDERS = ("codegen", "frontend", "ir", "passes", "runtime", "targets")


def __getattr__(name: str) -> ModuleType:
    """The packages below this one, imported when they are first asked for: `import v41c` alone costs nothing."""
    if name in _FOLDERS:
        return import_module(f"v41c.{name}")
    raise AttributeError(f"module v41c has no attribute {name}: expected one of {', '.join(_FOLDERS)}")
