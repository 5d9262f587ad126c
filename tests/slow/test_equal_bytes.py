"""Equal inputs give equal engines, from the trace to the last byte of machine code: nothing is taken from a cache."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from v41c.init import init

ROOT = Path(__file__).parents[2]


def test_equal_inputs_give_equal_bytes(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Two processes with different hash seeds, caches and working folders, one of them over an older engine."""
    checkpoint = tmp_path_factory.mktemp("model") / "tiny"
    init(checkpoint, "tiny", 0)
    (checkpoint / "chat_template.jinja").write_text("{{ messages[0].content }}")
    for number, cwd in enumerate((ROOT, tmp_path)):
        engine = tmp_path / f"e{number}"
        environment = {**os.environ, "PYTHONHASHSEED": str(number), "PYTHONPATH": str(ROOT)}
        environment["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
        command = [sys.executable, "-m", "v41c", "compile", str(checkpoint), "-o", str(engine), "--max-context", "64"]
        if number == 1:
            shutil.copytree(tmp_path / "e0", engine)
            (engine / "weights.bin").write_bytes(b"old")
        subprocess.run(command, cwd=cwd, env=environment, check=True, capture_output=True)
    files = [sorted(p.relative_to(tmp_path / e) for p in (tmp_path / e).rglob("*")) for e in ("e0", "e1")]
    assert files[0] == files[1]
    for name in files[0]:
        first, second = (tmp_path / e / name for e in ("e0", "e1"))
        assert first.is_dir() or first.read_bytes() == second.read_bytes(), name
    assert (tmp_path / "e0" / "chat_template.jinja").read_text() == "{{ messages[0].content }}"
    assert {path.name for path in tmp_path.iterdir()} == {"e0", "e1"}
