"""Runs the commands of the README's transcripts and writes down what they print.

python docs/refresh_readme.py            every command but the benchmark, which takes many minutes
python docs/refresh_readme.py --bench    the benchmark too: on a machine with nothing else to do
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
_BLOCK = re.compile(r"```console\n(.*?)```", re.DOTALL)
_COMMAND = re.compile(r"^\$ (.+)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)


def refresh(text: str, folder: Path, bench: bool) -> str:
    """The text with new transcripts. Commands run in `folder`, in the order in which they stand."""

    def printed(found: re.Match[str]) -> str:
        command, before = found[1], found[2]
        if command.startswith("v41c bench") and not bench:
            return found[0]
        print(f"$ {command}", file=sys.stderr)
        shell = ["bash", "-o", "pipefail", "-c", command.replace("v41c ", f"{sys.executable} -m v41c ", 1)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(shell, cwd=folder, env=environment, capture_output=True, text=True)
        if done.returncode not in (0, 1, 141):  # 141: the reader of a pipe had enough
            raise SystemExit(done.stderr or before)
        return f"$ {command}\n{done.stdout}{done.stderr}"

    return _BLOCK.sub(lambda block: f"```console\n{_COMMAND.sub(printed, block[1])}```", text)


def main() -> None:
    """Refresh the README in place."""
    readme = ROOT / "README.md"
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "v41c").symlink_to(ROOT / "v41c")
        text = refresh(readme.read_text(encoding="utf-8"), Path(folder), "--bench" in sys.argv[1:])
    readme.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
