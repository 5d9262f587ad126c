"""Where v41c keeps what it made and may make again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """v41c's folder in the user's cache: $XDG_CACHE_HOME or ~/.cache."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(given) if os.path.isabs(given) else Path.home() / ".cache") / "v41c"
