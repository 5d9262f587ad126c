"""The driver of `v41c demo`: compiles the shipped checkpoint into a cache folder and continues a prompt with it."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from v41c import __version__
from v41c.cache import cache_folder
from v41c.errors import ArtifactError

PROMPT = "And it came to pass,"
_PACKAGE = Path(__file__).parent


def demo(
    prompt: str,
    max_new_tokens: int,
    write: Callable[[str], None],
    progress: Callable[[str], None] = lambda text: None,
) -> Path:
    """Tell what is done as it is done, and the text as it comes; the engine's folder."""
    from v41c.frontend.presets import TRAINED_CHECKPOINT
    from v41c.run import Prompt, run
    from v41c.runtime.request import Options

    write(f"checkpoint  {TRAINED_CHECKPOINT}\n            a small trained model: 12 layers of width 192, one book\n")
    engine = cache_folder() / f"{TRAINED_CHECKPOINT.name}-{key(TRAINED_CHECKPOINT)}"
    if is_usable(engine):
        write(f"engine      {engine}, compiled before\n\n")
    else:
        _compile(TRAINED_CHECKPOINT, engine, write, progress)
    write(prompt)
    report = run(engine, Prompt(text=prompt), Options(max_new_tokens), write)
    write(f"\n\n{report.summary()}\n\n")
    write(f'Go on with:\n  v41c run {engine} --prompt "The LORD is my" --temperature 0.8\n  v41c inspect {engine}\n')
    return engine


def _compile(checkpoint: Path, engine: Path, write: Callable[[str], None], progress: Callable[[str], None]) -> None:
    from v41c.compile import compile
    from v41c.ledger import compile_summary
    from v41c.passes.pipeline import OPT_IN, PIPELINE

    shutil.rmtree(engine, ignore_errors=True)
    write("compiling   trace the eager model, rewrite its graph, build kernels for this CPU, pack the weights\n")
    for entry, why in PIPELINE:
        if entry.NAME not in OPT_IN:
            write(f"            {entry.NAME}, {why}\n")
    report = compile(checkpoint, engine, progress=progress)
    write(f"\n{compile_summary(report)}\n\n")


def key(checkpoint: Path) -> str:
    """What an engine depends on, in 16 characters: the checkpoint's files and the program that compiles them."""
    digest = hashlib.sha256(__version__.encode())
    for path in [*sorted(checkpoint.iterdir()), *_program()]:
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _program() -> Iterator[Path]:
    for folder, folders, files in os.walk(_PACKAGE, followlinks=True):
        folders[:] = sorted(name for name in folders if name not in ("data", "__pycache__"))
        yield from (Path(folder) / name for name in sorted(files) if name.endswith((".py", ".c")))


def is_usable(engine: Path) -> bool:
    """Whether a folder holds a whole engine that this machine can run."""
    from v41c.runtime.artifact import load

    try:
        load(engine)
    except ArtifactError:
        return False
    return True
