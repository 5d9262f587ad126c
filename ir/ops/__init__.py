"""Every operation, one file each, found by folder: `op_types()["rms_norm"]` is the class in `rms_norm.py`."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from v41c.ir.op import Op


@cache
def op_types() -> dict[str, type[Op]]:
    """Operation classes by name."""
    found: dict[str, type[Op]] = {}
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        (found[info.name],) = (
            member
            for member in vars(module).values()
            if isinstance(member, type) and issubclass(member, Op) and member.__module__ == module.__name__
        )
    return found
