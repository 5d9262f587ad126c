"""What the command line calls the prefix cache: a folder of prefixes, and what a session reuses of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from v41c.runtime.pool import Pool
from v41c.runtime.prefix_store import DEFAULT_LIMIT_BYTES, PrefixStore
from v41c.runtime.reuse import Reuse
from v41c.runtime.session import Session


@dataclass(frozen=True)
class PrefixCache:
    """A folder of prefixes that prompts may begin with, and its size limit, the store's own when None."""

    folder: Path
    limit_bytes: int | None = None

    def open(self, session: Session, pool: Pool | None = None) -> Reuse:
        """What a session reuses. UsageError for a path of a file."""
        limit = DEFAULT_LIMIT_BYTES if self.limit_bytes is None else self.limit_bytes
        return Reuse(session, PrefixStore(self.folder, session.engine.manifest, limit_bytes=limit), pool)
