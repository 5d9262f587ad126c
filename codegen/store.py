"""Files that are made once by content and kept: each is there complete or not at all, whoever else makes the same."""

from __future__ import annotations

import hashlib
import os
import tempfile
from functools import cache
from importlib.util import find_spec
from pathlib import Path


def keep(path: Path, content: bytes) -> None:
    """Put a file in its place, complete. OSError when that cannot be done."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        try:
            file.write(content)
            file.flush()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


@cache
def sources_key(*packages: str) -> str:
    """SHA-256 of the Python and C sources in some packages: when it changes, so may what they make."""
    digest = hashlib.sha256()
    for package in packages:
        spec = find_spec(package)
        for folder in map(Path, (spec.submodule_search_locations or ()) if spec else ()):
            for path in sorted([*folder.rglob("*.py"), *folder.rglob("*.c")]):
                digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
