"""`python -m v41c` is `v41c`."""

from __future__ import annotations

import sys

from v41c.cli import main

if __name__ == "__main__":
    sys.exit(main())
